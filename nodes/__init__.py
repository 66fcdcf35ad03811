"""What stands in a graph: environments, connectors, modules, and the rollout that joins them.

Names are imported when they are first asked for: a process that only steps environments needs no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollflow.nodes.connectors.by_module import module_by_module
    from rollflow.nodes.connectors.common.add_observations_from_episodes_to_batch import (
        LAST_OBSERVATIONS,
        AddObservationsFromEpisodesToBatch,
    )
    from rollflow.nodes.connectors.common.add_states_from_episodes_to_batch import AddStatesFromEpisodesToBatch
    from rollflow.nodes.connectors.common.add_time_dim_to_batch_and_zero_pad import AddTimeDimToBatchAndZeroPad
    from rollflow.nodes.connectors.common.agent_to_module_mapping import DEFAULT_MODULE_ID, AgentToModuleMapping
    from rollflow.nodes.connectors.common.batch_individual_items import BatchIndividualItems
    from rollflow.nodes.connectors.common.frame_stacking import FrameStacking
    from rollflow.nodes.connectors.common.numpy_to_tensor import NumpyToTensor
    from rollflow.nodes.connectors.common.tensor_to_numpy import TensorToNumpy
    from rollflow.nodes.connectors.connector_pipeline_v2 import ConnectorPipelineV2
    from rollflow.nodes.connectors.connector_v2 import ConnectorV2
    from rollflow.nodes.connectors.env_to_module.env_to_module_pipeline import EnvToModulePipeline
    from rollflow.nodes.connectors.env_to_module.flatten_observations import FlattenObservations
    from rollflow.nodes.connectors.env_to_module.mean_std_filter import MeanStdFilter
    from rollflow.nodes.connectors.env_to_module.observation_preprocessor import (
        MultiAgentObservationPreprocessor,
        ObservationPreprocessor,
        SingleAgentObservationPreprocessor,
    )
    from rollflow.nodes.connectors.env_to_module.one_hot_observations import OneHotObservations
    from rollflow.nodes.connectors.env_to_module.prev_actions_prev_rewards import PrevActionsPrevRewards
    from rollflow.nodes.connectors.env_to_module.write_observations_to_episodes import WriteObservationsToEpisodes
    from rollflow.nodes.connectors.lambda_connector import LambdaConnector
    from rollflow.nodes.connectors.learner.add_columns_from_episodes_to_train_batch import (
        AddColumnsFromEpisodesToBatch,
        AddColumnsFromEpisodesToTrainBatch,
    )
    from rollflow.nodes.connectors.learner.add_infos_from_episodes_to_train_batch import (
        AddInfosFromEpisodesToTrainBatch,
    )
    from rollflow.nodes.connectors.learner.add_next_observations_from_episodes_to_train_batch import (
        AddNextObservationsFromEpisodesToTrainBatch,
    )
    from rollflow.nodes.connectors.learner.add_one_ts_to_episodes_and_truncate import AddOneTsToEpisodesAndTruncate
    from rollflow.nodes.connectors.learner.clip_rewards import ClipRewards
    from rollflow.nodes.connectors.learner.compute_returns_to_go import ComputeReturnsToGo
    from rollflow.nodes.connectors.learner.general_advantage_estimation import GeneralAdvantageEstimation
    from rollflow.nodes.connectors.learner.learner_connector_pipeline import LearnerConnectorPipeline
    from rollflow.nodes.connectors.learner.n_step_returns import NStepReturns
    from rollflow.nodes.connectors.learner.v_trace import VTrace
    from rollflow.nodes.connectors.module_to_env.clip_actions import ClipActions
    from rollflow.nodes.connectors.module_to_env.get_actions import GetActions
    from rollflow.nodes.connectors.module_to_env.listify_data_for_vector_env import ListifyDataForVectorEnv
    from rollflow.nodes.connectors.module_to_env.module_to_agent_unmapping import ModuleToAgentUnmapping
    from rollflow.nodes.connectors.module_to_env.module_to_env_pipeline import ModuleToEnvPipeline
    from rollflow.nodes.connectors.module_to_env.normalize_and_clip_actions import NormalizeAndClipActions
    from rollflow.nodes.connectors.module_to_env.remove_single_ts_time_rank_from_batch import (
        RemoveSingleTsTimeRankFromBatch,
    )
    from rollflow.nodes.connectors.module_to_env.unbatch_to_individual_items import UnBatchToIndividualItems
    from rollflow.nodes.default_model_config import DefaultModelConfig
    from rollflow.nodes.default_module import DefaultModule
    from rollflow.nodes.distribution import (
        Bernoulli,
        Categorical,
        Deterministic,
        DiagGaussian,
        MultiCategorical,
        MultiDistribution,
        distribution_for,
    )
    from rollflow.nodes.env_to_module import EnvToModule
    from rollflow.nodes.environments import Environments
    from rollflow.nodes.episode_returns import EpisodeReturns
    from rollflow.nodes.lag import LagBound
    from rollflow.nodes.metrics_logger import MetricsLogger
    from rollflow.nodes.module_forward import GatheringForward, ModuleForward, ReadyForward
    from rollflow.nodes.module_to_env import ModuleToEnv
    from rollflow.nodes.multi_agent.array_vector import ArrayStep, MultiAgentVectorEnv
    from rollflow.nodes.multi_agent.multi_agent_env import MultiAgentEnv
    from rollflow.nodes.multi_agent.multi_agent_rollout import MultiAgentRollout
    from rollflow.nodes.multi_agent.multi_rl_module import MultiRLModule
    from rollflow.nodes.multi_agent.petting_zoo import ParallelPettingZooEnv, PettingZooEnv
    from rollflow.nodes.multi_agent.random_module import RandomModule
    from rollflow.nodes.policy_weights import PolicyWeights
    from rollflow.nodes.remote.env_host import EnvHost
    from rollflow.nodes.remote.remote_envs import RemoteEnvs, RemoteRollouts
    from rollflow.nodes.remote.rollout_host import RolloutHost
    from rollflow.nodes.rl_module import RLModule
    from rollflow.nodes.rollout import Rollout

__all__ = [
    "DEFAULT_MODULE_ID",
    "LAST_OBSERVATIONS",
    "AddColumnsFromEpisodesToBatch",
    "AddColumnsFromEpisodesToTrainBatch",
    "AddInfosFromEpisodesToTrainBatch",
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
    "FlattenObservations",
    "FrameStacking",
    "GatheringForward",
    "GeneralAdvantageEstimation",
    "GetActions",
    "LagBound",
    "LambdaConnector",
    "LearnerConnectorPipeline",
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
    "OneHotObservations",
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
    "TensorToNumpy",
    "UnBatchToIndividualItems",
    "VTrace",
    "WriteObservationsToEpisodes",
    "distribution_for",
    "module_by_module",
]

_HOMES = {
    "DEFAULT_MODULE_ID": "connectors.common.agent_to_module_mapping",
    "LAST_OBSERVATIONS": "connectors.common.add_observations_from_episodes_to_batch",
    "AddColumnsFromEpisodesToBatch": "connectors.learner.add_columns_from_episodes_to_train_batch",
    "AddColumnsFromEpisodesToTrainBatch": "connectors.learner.add_columns_from_episodes_to_train_batch",
    "AddInfosFromEpisodesToTrainBatch": "connectors.learner.add_infos_from_episodes_to_train_batch",
    "AddNextObservationsFromEpisodesToTrainBatch": (
        "connectors.learner.add_next_observations_from_episodes_to_train_batch"
    ),
    "AddObservationsFromEpisodesToBatch": "connectors.common.add_observations_from_episodes_to_batch",
    "AddOneTsToEpisodesAndTruncate": "connectors.learner.add_one_ts_to_episodes_and_truncate",
    "AddStatesFromEpisodesToBatch": "connectors.common.add_states_from_episodes_to_batch",
    "AddTimeDimToBatchAndZeroPad": "connectors.common.add_time_dim_to_batch_and_zero_pad",
    "AgentToModuleMapping": "connectors.common.agent_to_module_mapping",
    "ArrayStep": "multi_agent.array_vector",
    "BatchIndividualItems": "connectors.common.batch_individual_items",
    "Bernoulli": "distribution",
    "Categorical": "distribution",
    "ClipActions": "connectors.module_to_env.clip_actions",
    "ClipRewards": "connectors.learner.clip_rewards",
    "ComputeReturnsToGo": "connectors.learner.compute_returns_to_go",
    "ConnectorPipelineV2": "connectors.connector_pipeline_v2",
    "ConnectorV2": "connectors.connector_v2",
    "DefaultModelConfig": "default_model_config",
    "DefaultModule": "default_module",
    "Deterministic": "distribution",
    "DiagGaussian": "distribution",
    "EnvHost": "remote.env_host",
    "EnvToModule": "env_to_module",
    "EnvToModulePipeline": "connectors.env_to_module.env_to_module_pipeline",
    "Environments": "environments",
    "EpisodeReturns": "episode_returns",
    "FlattenObservations": "connectors.env_to_module.flatten_observations",
    "FrameStacking": "connectors.common.frame_stacking",
    "GatheringForward": "module_forward",
    "GeneralAdvantageEstimation": "connectors.learner.general_advantage_estimation",
    "GetActions": "connectors.module_to_env.get_actions",
    "LagBound": "lag",
    "LambdaConnector": "connectors.lambda_connector",
    "LearnerConnectorPipeline": "connectors.learner.learner_connector_pipeline",
    "ListifyDataForVectorEnv": "connectors.module_to_env.listify_data_for_vector_env",
    "MeanStdFilter": "connectors.env_to_module.mean_std_filter",
    "MetricsLogger": "metrics_logger",
    "ModuleForward": "module_forward",
    "ModuleToAgentUnmapping": "connectors.module_to_env.module_to_agent_unmapping",
    "ModuleToEnv": "module_to_env",
    "ModuleToEnvPipeline": "connectors.module_to_env.module_to_env_pipeline",
    "MultiAgentEnv": "multi_agent.multi_agent_env",
    "MultiAgentRollout": "multi_agent.multi_agent_rollout",
    "MultiAgentVectorEnv": "multi_agent.array_vector",
    "MultiAgentObservationPreprocessor": "connectors.env_to_module.observation_preprocessor",
    "MultiCategorical": "distribution",
    "MultiDistribution": "distribution",
    "MultiRLModule": "multi_agent.multi_rl_module",
    "NStepReturns": "connectors.learner.n_step_returns",
    "NormalizeAndClipActions": "connectors.module_to_env.normalize_and_clip_actions",
    "NumpyToTensor": "connectors.common.numpy_to_tensor",
    "ObservationPreprocessor": "connectors.env_to_module.observation_preprocessor",
    "OneHotObservations": "connectors.env_to_module.one_hot_observations",
    "ParallelPettingZooEnv": "multi_agent.petting_zoo",
    "PettingZooEnv": "multi_agent.petting_zoo",
    "PolicyWeights": "policy_weights",
    "PrevActionsPrevRewards": "connectors.env_to_module.prev_actions_prev_rewards",
    "RLModule": "rl_module",
    "RandomModule": "multi_agent.random_module",
    "ReadyForward": "module_forward",
    "RemoteEnvs": "remote.remote_envs",
    "RemoteRollouts": "remote.remote_envs",
    "RemoveSingleTsTimeRankFromBatch": "connectors.module_to_env.remove_single_ts_time_rank_from_batch",
    "Rollout": "rollout",
    "RolloutHost": "remote.rollout_host",
    "SingleAgentObservationPreprocessor": "connectors.env_to_module.observation_preprocessor",
    "TensorToNumpy": "connectors.common.tensor_to_numpy",
    "UnBatchToIndividualItems": "connectors.module_to_env.unbatch_to_individual_items",
    "VTrace": "connectors.learner.v_trace",
    "WriteObservationsToEpisodes": "connectors.env_to_module.write_observations_to_episodes",
    "distribution_for": "distribution",
    "module_by_module": "connectors.by_module",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
