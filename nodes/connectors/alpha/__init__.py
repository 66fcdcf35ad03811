"""RLlib's connectors of the older stack, "Connectors (Alpha)": what a policy carries to act anywhere.

Names are imported when they are first asked for.
"""

from typing import TYPE_CHECKING

from rollflow.stream.data.lazy_names import lazy_names

if TYPE_CHECKING:
    from rollflow.nodes.connectors.alpha.built_in import (
        ClipActionsConnector as ClipActionsConnector,
        ClipRewardAgentConnector as ClipRewardAgentConnector,
        ConvertToNumpyConnector as ConvertToNumpyConnector,
        ImmutableActionsConnector as ImmutableActionsConnector,
        NormalizeActionsConnector as NormalizeActionsConnector,
        ObsPreprocessorConnector as ObsPreprocessorConnector,
        StateBufferConnector as StateBufferConnector,
        ViewRequirementAgentConnector as ViewRequirementAgentConnector,
    )
    from rollflow.nodes.connectors.alpha.connector import (
        ActionConnector as ActionConnector,
        ActionConnectorDataType as ActionConnectorDataType,
        ActionConnectorPipeline as ActionConnectorPipeline,
        AgentConnector as AgentConnector,
        AgentConnectorDataType as AgentConnectorDataType,
        AgentConnectorPipeline as AgentConnectorPipeline,
        AgentConnectorsOutput as AgentConnectorsOutput,
        Connector as Connector,
        ConnectorContext as ConnectorContext,
        ConnectorPipeline as ConnectorPipeline,
        PolicyOutputType as PolicyOutputType,
        SampleBatch as SampleBatch,
        get_connector as get_connector,
        register_connector as register_connector,
        register_lambda_action_connector as register_lambda_action_connector,
        register_lambda_agent_connector as register_lambda_agent_connector,
    )
    from rollflow.nodes.connectors.alpha.inference import (
        ConnectorPolicy as ConnectorPolicy,
        default_action_connectors as default_action_connectors,
        default_agent_connectors as default_agent_connectors,
        local_policy_inference as local_policy_inference,
    )
    from rollflow.nodes.connectors.alpha.pieces import as_connector_v2 as as_connector_v2

__all__, __getattr__, __dir__ = lazy_names(__name__)
