"""RLlib's connectors of the older stack, "Connectors (Alpha)": what a policy carries to act anywhere.

Names are imported when they are first asked for.
"""

from typing import TYPE_CHECKING

from rollflow.stream.data.lazy_names import lazy_names

if TYPE_CHECKING:
    from rollflow.nodes.connectors.alpha.action_connectors import (
        ClipActionsConnector,
        ConvertToNumpyConnector,
        ImmutableActionsConnector,
        NormalizeActionsConnector,
    )
    from rollflow.nodes.connectors.alpha.agent_connectors import (
        ClipRewardAgentConnector,
        EnvSamplingAgentConnector,
        FlattenDataAgentConnector,
        ObsPreprocessorConnector,
        StateBufferConnector,
    )
    from rollflow.nodes.connectors.alpha.connector import ActionConnector, AgentConnector, Connector, ConnectorContext
    from rollflow.nodes.connectors.alpha.defaults import default_action_connectors, default_agent_connectors
    from rollflow.nodes.connectors.alpha.inference import ConnectorPolicy, connected_inference, local_policy_inference
    from rollflow.nodes.connectors.alpha.lambdas import (
        register_lambda_action_connector,
        register_lambda_agent_connector,
    )
    from rollflow.nodes.connectors.alpha.mean_std import (
        ConcurrentMeanStdObservationFilterAgentConnector,
        MeanStdObservationFilterAgentConnector,
    )
    from rollflow.nodes.connectors.alpha.pieces import as_connector_v2
    from rollflow.nodes.connectors.alpha.pipeline import (
        ActionConnectorPipeline,
        AgentConnectorPipeline,
        ConnectorPipeline,
    )
    from rollflow.nodes.connectors.alpha.records import (
        ActionConnectorDataType,
        AgentConnectorDataType,
        AgentConnectorsOutput,
        PolicyOutputType,
        SampleBatch,
    )
    from rollflow.nodes.connectors.alpha.registry import get_connector, register_connector
    from rollflow.nodes.connectors.alpha.signatures import (
        FieldChange,
        SignatureReport,
        compare_signatures,
        compare_spaces,
    )
    from rollflow.nodes.connectors.alpha.views import ViewRequirement, ViewRequirementAgentConnector

__all__ = [
    "ActionConnector",
    "ActionConnectorDataType",
    "ActionConnectorPipeline",
    "AgentConnector",
    "AgentConnectorDataType",
    "AgentConnectorPipeline",
    "AgentConnectorsOutput",
    "ClipActionsConnector",
    "ClipRewardAgentConnector",
    "ConcurrentMeanStdObservationFilterAgentConnector",
    "Connector",
    "ConnectorContext",
    "ConnectorPipeline",
    "ConnectorPolicy",
    "ConvertToNumpyConnector",
    "EnvSamplingAgentConnector",
    "FieldChange",
    "FlattenDataAgentConnector",
    "ImmutableActionsConnector",
    "MeanStdObservationFilterAgentConnector",
    "NormalizeActionsConnector",
    "ObsPreprocessorConnector",
    "PolicyOutputType",
    "SampleBatch",
    "SignatureReport",
    "StateBufferConnector",
    "ViewRequirement",
    "ViewRequirementAgentConnector",
    "as_connector_v2",
    "compare_signatures",
    "compare_spaces",
    "connected_inference",
    "default_action_connectors",
    "default_agent_connectors",
    "get_connector",
    "local_policy_inference",
    "register_connector",
    "register_lambda_action_connector",
    "register_lambda_agent_connector",
]

_HOMES = {
    "ActionConnector": "connector",
    "ActionConnectorDataType": "records",
    "ActionConnectorPipeline": "pipeline",
    "AgentConnector": "connector",
    "AgentConnectorDataType": "records",
    "AgentConnectorPipeline": "pipeline",
    "AgentConnectorsOutput": "records",
    "ClipActionsConnector": "action_connectors",
    "ClipRewardAgentConnector": "agent_connectors",
    "ConcurrentMeanStdObservationFilterAgentConnector": "mean_std",
    "Connector": "connector",
    "ConnectorContext": "connector",
    "ConnectorPipeline": "pipeline",
    "ConnectorPolicy": "inference",
    "ConvertToNumpyConnector": "action_connectors",
    "EnvSamplingAgentConnector": "agent_connectors",
    "FieldChange": "signatures",
    "FlattenDataAgentConnector": "agent_connectors",
    "ImmutableActionsConnector": "action_connectors",
    "MeanStdObservationFilterAgentConnector": "mean_std",
    "NormalizeActionsConnector": "action_connectors",
    "ObsPreprocessorConnector": "agent_connectors",
    "PolicyOutputType": "records",
    "SampleBatch": "records",
    "SignatureReport": "signatures",
    "StateBufferConnector": "agent_connectors",
    "ViewRequirement": "views",
    "ViewRequirementAgentConnector": "views",
    "as_connector_v2": "pieces",
    "compare_signatures": "signatures",
    "compare_spaces": "signatures",
    "connected_inference": "inference",
    "default_action_connectors": "defaults",
    "default_agent_connectors": "defaults",
    "get_connector": "registry",
    "local_policy_inference": "inference",
    "register_connector": "registry",
    "register_lambda_action_connector": "lambdas",
    "register_lambda_agent_connector": "lambdas",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
