"""Nodes of a graph: environments, connectors, modules, and the rollout that joins them.

Names are imported when they are first asked for: a process that only steps environments needs no torch.
"""

from typing import TYPE_CHECKING

from rollflow.stream.data.lazy_names import lazy_names

if TYPE_CHECKING:
    from rollflow.nodes.connectors.common.batches import AgentToModuleMapping as AgentToModuleMapping
    from rollflow.nodes.connectors.connector_v2 import LambdaConnector as LambdaConnector
    from rollflow.nodes.connectors.env_to_module.observation_pieces import (
        FlattenObservations as FlattenObservations,
        MultiAgentObservationPreprocessor as MultiAgentObservationPreprocessor,
        ObservationPreprocessor as ObservationPreprocessor,
        OneHotObservations as OneHotObservations,
        PrevActionsPrevRewards as PrevActionsPrevRewards,
        SingleAgentObservationPreprocessor as SingleAgentObservationPreprocessor,
    )
    from rollflow.nodes.connectors.learner.train_columns import (
        AddNextObservationsFromEpisodesToTrainBatch as AddNextObservationsFromEpisodesToTrainBatch,
        ClipRewards as ClipRewards,
        ComputeReturnsToGo as ComputeReturnsToGo,
        NStepReturns as NStepReturns,
    )
    from rollflow.nodes.connectors.module_to_env.action_pieces import (
        ClipActions as ClipActions,
        GaussianNoise as GaussianNoise,
        Linear as Linear,
        NormalizeAndClipActions as NormalizeAndClipActions,
        Temperature as Temperature,
    )
    from rollflow.nodes.connectors.pipelines.adapting import (
        AdaptActions as AdaptActions,
        AdaptObservations as AdaptObservations,
    )
    from rollflow.nodes.connectors.pipelines.connector_pipeline_v2 import ConnectorPipelineV2 as ConnectorPipelineV2
    from rollflow.nodes.connectors.pipelines.default_pipelines import (
        EnvToModulePipeline as EnvToModulePipeline,
        LearnerConnectorPipeline as LearnerConnectorPipeline,
        ModuleToEnvPipeline as ModuleToEnvPipeline,
    )
    from rollflow.nodes.env.multi_agent_env import (
        ArrayStep as ArrayStep,
        MultiAgentEnv as MultiAgentEnv,
        MultiAgentVectorEnv as MultiAgentVectorEnv,
    )
    from rollflow.nodes.external.external_env import ExternalEnv as ExternalEnv
    from rollflow.nodes.launch.on_hosts import OnProcesses as OnProcesses, OnRay as OnRay
    from rollflow.nodes.metrics.episode_returns import EpisodeReturns as EpisodeReturns
    from rollflow.nodes.metrics.metrics_logger import MetricsLogger as MetricsLogger
    from rollflow.nodes.modules.default_module import DefaultModule as DefaultModule
    from rollflow.nodes.modules.distribution import mask_logits as mask_logits
    from rollflow.nodes.modules.given_module import RandomModule as RandomModule
    from rollflow.nodes.modules.rl_module import MultiRLModule as MultiRLModule

__all__, __getattr__, __dir__ = lazy_names(__name__)
