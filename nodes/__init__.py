"""What stands in a graph: environments, connectors, modules, and the rollout that joins them."""

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
from rollflow.nodes.connectors.learner.add_infos_from_episodes_to_train_batch import AddInfosFromEpisodesToTrainBatch
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
from rollflow.nodes.module_forward import GatheringForward, ModuleForward
from rollflow.nodes.module_to_env import ModuleToEnv
from rollflow.nodes.policy_weights import PolicyWeights
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
    "MultiCategorical",
    "MultiDistribution",
    "NStepReturns",
    "NormalizeAndClipActions",
    "NumpyToTensor",
    "ObservationPreprocessor",
    "OneHotObservations",
    "PolicyWeights",
    "PrevActionsPrevRewards",
    "RLModule",
    "RemoveSingleTsTimeRankFromBatch",
    "Rollout",
    "SingleAgentObservationPreprocessor",
    "TensorToNumpy",
    "UnBatchToIndividualItems",
    "VTrace",
    "WriteObservationsToEpisodes",
    "distribution_for",
]
