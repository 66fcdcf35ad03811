"""Nodes of a graph: environments, connectors, modules, and the rollout that joins them.

Names are imported when they are first asked for: a process that only steps environments needs no torch.
"""

from typing import TYPE_CHECKING

from rollflow.stream.data.lazy_names import lazy_names

if TYPE_CHECKING:
    from rollflow.nodes.connectors.adapting.pieces import AdaptActions, AdaptObservations
    from rollflow.nodes.connectors.common.batch_individual_items import BatchIndividualItems
    from rollflow.nodes.connectors.common.by_module import DEFAULT_MODULE_ID, AgentToModuleMapping, module_by_module
    from rollflow.nodes.connectors.common.episode_columns import (
        LAST_OBSERVATIONS,
        AddLaneAndSlotToBatch,
        AddObservationsFromEpisodesToBatch,
    )
    from rollflow.nodes.connectors.common.frame_stacking import FrameStacking
    from rollflow.nodes.connectors.common.stateful_columns import (
        AddStatesFromEpisodesToBatch,
        AddTimeDimToBatchAndZeroPad,
    )
    from rollflow.nodes.connectors.common.tensors import NumpyToTensor, TensorToNumpy
    from rollflow.nodes.connectors.connector_v2 import ConnectorV2
    from rollflow.nodes.connectors.env_to_module.mean_std_filter import MeanStdFilter
    from rollflow.nodes.connectors.env_to_module.observation_pieces import (
        FlattenObservations,
        OneHotObservations,
        PrevActionsPrevRewards,
        WriteObservationsToEpisodes,
    )
    from rollflow.nodes.connectors.env_to_module.observation_preprocessor import (
        MultiAgentObservationPreprocessor,
        ObservationPreprocessor,
        SingleAgentObservationPreprocessor,
    )
    from rollflow.nodes.connectors.lambda_connector import LambdaConnector
    from rollflow.nodes.connectors.learner.advantages import GeneralAdvantageEstimation, VTrace
    from rollflow.nodes.connectors.learner.minibatches import minibatches
    from rollflow.nodes.connectors.learner.rewards import ClipRewards, ComputeReturnsToGo, NStepReturns
    from rollflow.nodes.connectors.learner.train_columns import (
        AddColumnsFromEpisodesToBatch,
        AddColumnsFromEpisodesToTrainBatch,
        AddInfosFromEpisodesToTrainBatch,
        AddNextObservationsFromEpisodesToTrainBatch,
        AddOneTsToEpisodesAndTruncate,
    )
    from rollflow.nodes.connectors.module_to_env.exploration import (
        EpsilonGreedy,
        GaussianNoise,
        Linear,
        OrnsteinUhlenbeckNoise,
        Temperature,
    )
    from rollflow.nodes.connectors.module_to_env.get_actions import GetActions
    from rollflow.nodes.connectors.module_to_env.individual_items import (
        ListifyDataForVectorEnv,
        ModuleToAgentUnmapping,
        RemoveSingleTsTimeRankFromBatch,
        UnBatchToIndividualItems,
    )
    from rollflow.nodes.connectors.module_to_env.normalize_and_clip_actions import ClipActions, NormalizeAndClipActions
    from rollflow.nodes.connectors.pipelines.connector_pipeline_v2 import ConnectorPipelineV2
    from rollflow.nodes.connectors.pipelines.default_pipelines import (
        EnvToModulePipeline,
        LearnerConnectorPipeline,
        ModuleToEnvPipeline,
    )
    from rollflow.nodes.env.environments import Environments
    from rollflow.nodes.env.multi_agent.array_vector import ArrayStep, MultiAgentVectorEnv
    from rollflow.nodes.env.multi_agent.multi_agent_env import MultiAgentEnv
    from rollflow.nodes.env.multi_agent.petting_zoo import ParallelPettingZooEnv, PettingZooEnv
    from rollflow.nodes.env.remote.env_host import EnvHost
    from rollflow.nodes.env.remote.remote_envs import RemoteEnvs, RemoteRollouts
    from rollflow.nodes.external.external_env import ExternalEnv
    from rollflow.nodes.launch.on_hosts import OnProcesses, OnRay
    from rollflow.nodes.metrics.episode_returns import EpisodeReturns, FinishedEpisode
    from rollflow.nodes.metrics.metrics_logger import MetricsLogger
    from rollflow.nodes.modules.action_masks import mask_logits
    from rollflow.nodes.modules.default_model_config import DefaultModelConfig
    from rollflow.nodes.modules.default_module import DefaultModule
    from rollflow.nodes.modules.distribution import (
        Bernoulli,
        Categorical,
        Deterministic,
        DiagGaussian,
        MultiCategorical,
        MultiDistribution,
        distribution_for,
    )
    from rollflow.nodes.modules.given_module import GivenModule
    from rollflow.nodes.modules.multi_rl_module import MultiRLModule
    from rollflow.nodes.modules.policy_weights import PolicyWeights
    from rollflow.nodes.modules.random_module import RandomModule
    from rollflow.nodes.modules.rl_module import RLModule
    from rollflow.nodes.offloaded.rollout_host import RolloutHost
    from rollflow.nodes.rollout.multi_agent_rollout import MultiAgentRollout
    from rollflow.nodes.rollout.rollout import Rollout
    from rollflow.nodes.stages.env_to_module import EnvToModule
    from rollflow.nodes.stages.joint_forward import GatheringForward, ReadyForward
    from rollflow.nodes.stages.module_forward import ModuleForward
    from rollflow.nodes.stages.module_to_env import ModuleToEnv
    from rollflow.nodes.stages.staleness import LagBound

__all__ = [
    "DEFAULT_MODULE_ID",
    "LAST_OBSERVATIONS",
    "AdaptActions",
    "AdaptObservations",
    "AddColumnsFromEpisodesToBatch",
    "AddColumnsFromEpisodesToTrainBatch",
    "AddInfosFromEpisodesToTrainBatch",
    "AddLaneAndSlotToBatch",
    "AddNextObservationsFromEpisodesToTrainBatch",
    "AddObservationsFromEpisodesToBatch",
    "AddOneTsToEpisodesAndTruncate",
    "AddStatesFromEpisodesToBatch",
    "AddTimeDimToBatchAndZeroPad",
    "AgentToModuleMapping",
    "ArrayStep",
    "BatchIndividualItems",
    "Bernoulli",
    "Categorical",
    "ClipActions",
    "ClipRewards",
    "ComputeReturnsToGo",
    "ConnectorPipelineV2",
    "ConnectorV2",
    "DefaultModelConfig",
    "DefaultModule",
    "Deterministic",
    "DiagGaussian",
    "EnvHost",
    "EnvToModule",
    "EnvToModulePipeline",
    "Environments",
    "EpisodeReturns",
    "EpsilonGreedy",
    "ExternalEnv",
    "FinishedEpisode",
    "FlattenObservations",
    "FrameStacking",
    "GatheringForward",
    "GaussianNoise",
    "GeneralAdvantageEstimation",
    "GetActions",
    "GivenModule",
    "LagBound",
    "LambdaConnector",
    "LearnerConnectorPipeline",
    "Linear",
    "ListifyDataForVectorEnv",
    "MeanStdFilter",
    "MetricsLogger",
    "ModuleForward",
    "ModuleToAgentUnmapping",
    "ModuleToEnv",
    "ModuleToEnvPipeline",
    "MultiAgentEnv",
    "MultiAgentObservationPreprocessor",
    "MultiAgentRollout",
    "MultiAgentVectorEnv",
    "MultiCategorical",
    "MultiDistribution",
    "MultiRLModule",
    "NStepReturns",
    "NormalizeAndClipActions",
    "NumpyToTensor",
    "ObservationPreprocessor",
    "OnProcesses",
    "OnRay",
    "OneHotObservations",
    "OrnsteinUhlenbeckNoise",
    "ParallelPettingZooEnv",
    "PettingZooEnv",
    "PolicyWeights",
    "PrevActionsPrevRewards",
    "RLModule",
    "RandomModule",
    "ReadyForward",
    "RemoteEnvs",
    "RemoteRollouts",
    "RemoveSingleTsTimeRankFromBatch",
    "Rollout",
    "RolloutHost",
    "SingleAgentObservationPreprocessor",
    "Temperature",
    "TensorToNumpy",
    "UnBatchToIndividualItems",
    "VTrace",
    "WriteObservationsToEpisodes",
    "distribution_for",
    "mask_logits",
    "minibatches",
    "module_by_module",
]

_HOMES = {
    "DEFAULT_MODULE_ID": "connectors.common.by_module",
    "LAST_OBSERVATIONS": "connectors.common.episode_columns",
    "AdaptActions": "connectors.adapting.pieces",
    "AdaptObservations": "connectors.adapting.pieces",
    "AddColumnsFromEpisodesToBatch": "connectors.learner.train_columns",
    "AddColumnsFromEpisodesToTrainBatch": "connectors.learner.train_columns",
    "AddInfosFromEpisodesToTrainBatch": "connectors.learner.train_columns",
    "AddLaneAndSlotToBatch": "connectors.common.episode_columns",
    "AddNextObservationsFromEpisodesToTrainBatch": ("connectors.learner.train_columns"),
    "AddObservationsFromEpisodesToBatch": "connectors.common.episode_columns",
    "AddOneTsToEpisodesAndTruncate": "connectors.learner.train_columns",
    "AddStatesFromEpisodesToBatch": "connectors.common.stateful_columns",
    "AddTimeDimToBatchAndZeroPad": "connectors.common.stateful_columns",
    "AgentToModuleMapping": "connectors.common.by_module",
    "ArrayStep": "env.multi_agent.array_vector",
    "BatchIndividualItems": "connectors.common.batch_individual_items",
    "Bernoulli": "modules.distribution",
    "Categorical": "modules.distribution",
    "ClipActions": "connectors.module_to_env.normalize_and_clip_actions",
    "ClipRewards": "connectors.learner.rewards",
    "ComputeReturnsToGo": "connectors.learner.rewards",
    "ConnectorPipelineV2": "connectors.pipelines.connector_pipeline_v2",
    "ConnectorV2": "connectors.connector_v2",
    "DefaultModelConfig": "modules.default_model_config",
    "DefaultModule": "modules.default_module",
    "Deterministic": "modules.distribution",
    "DiagGaussian": "modules.distribution",
    "EnvHost": "env.remote.env_host",
    "ExternalEnv": "external.external_env",
    "EnvToModule": "stages.env_to_module",
    "EnvToModulePipeline": "connectors.pipelines.default_pipelines",
    "EpsilonGreedy": "connectors.module_to_env.exploration",
    "Environments": "env.environments",
    "EpisodeReturns": "metrics.episode_returns",
    "FinishedEpisode": "metrics.episode_returns",
    "FlattenObservations": "connectors.env_to_module.observation_pieces",
    "FrameStacking": "connectors.common.frame_stacking",
    "GatheringForward": "stages.joint_forward",
    "GaussianNoise": "connectors.module_to_env.exploration",
    "GeneralAdvantageEstimation": "connectors.learner.advantages",
    "GivenModule": "modules.given_module",
    "GetActions": "connectors.module_to_env.get_actions",
    "LagBound": "stages.staleness",
    "LambdaConnector": "connectors.lambda_connector",
    "LearnerConnectorPipeline": "connectors.pipelines.default_pipelines",
    "Linear": "connectors.module_to_env.exploration",
    "ListifyDataForVectorEnv": "connectors.module_to_env.individual_items",
    "MeanStdFilter": "connectors.env_to_module.mean_std_filter",
    "MetricsLogger": "metrics.metrics_logger",
    "ModuleForward": "stages.module_forward",
    "ModuleToAgentUnmapping": "connectors.module_to_env.individual_items",
    "ModuleToEnv": "stages.module_to_env",
    "ModuleToEnvPipeline": "connectors.pipelines.default_pipelines",
    "MultiAgentEnv": "env.multi_agent.multi_agent_env",
    "MultiAgentRollout": "rollout.multi_agent_rollout",
    "MultiAgentVectorEnv": "env.multi_agent.array_vector",
    "MultiAgentObservationPreprocessor": "connectors.env_to_module.observation_preprocessor",
    "MultiCategorical": "modules.distribution",
    "MultiDistribution": "modules.distribution",
    "MultiRLModule": "modules.multi_rl_module",
    "NStepReturns": "connectors.learner.rewards",
    "NormalizeAndClipActions": "connectors.module_to_env.normalize_and_clip_actions",
    "NumpyToTensor": "connectors.common.tensors",
    "ObservationPreprocessor": "connectors.env_to_module.observation_preprocessor",
    "OnProcesses": "launch.on_hosts",
    "OnRay": "launch.on_hosts",
    "OneHotObservations": "connectors.env_to_module.observation_pieces",
    "OrnsteinUhlenbeckNoise": "connectors.module_to_env.exploration",
    "ParallelPettingZooEnv": "env.multi_agent.petting_zoo",
    "PettingZooEnv": "env.multi_agent.petting_zoo",
    "PolicyWeights": "modules.policy_weights",
    "PrevActionsPrevRewards": "connectors.env_to_module.observation_pieces",
    "RLModule": "modules.rl_module",
    "RandomModule": "modules.random_module",
    "ReadyForward": "stages.joint_forward",
    "RemoteEnvs": "env.remote.remote_envs",
    "RemoteRollouts": "env.remote.remote_envs",
    "RemoveSingleTsTimeRankFromBatch": "connectors.module_to_env.individual_items",
    "Rollout": "rollout.rollout",
    "RolloutHost": "offloaded.rollout_host",
    "SingleAgentObservationPreprocessor": "connectors.env_to_module.observation_preprocessor",
    "Temperature": "connectors.module_to_env.exploration",
    "TensorToNumpy": "connectors.common.tensors",
    "UnBatchToIndividualItems": "connectors.module_to_env.individual_items",
    "VTrace": "connectors.learner.advantages",
    "WriteObservationsToEpisodes": "connectors.env_to_module.observation_pieces",
    "distribution_for": "modules.distribution",
    "mask_logits": "modules.action_masks",
    "minibatches": "connectors.learner.minibatches",
    "module_by_module": "connectors.common.by_module",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
