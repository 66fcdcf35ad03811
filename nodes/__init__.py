"""What stands in a graph: environments, connectors, modules, and the rollout that joins them."""

from rollflow.nodes.connectors.add_columns_from_episodes_to_train_batch import (
    AddColumnsFromEpisodesToBatch,
    AddColumnsFromEpisodesToTrainBatch,
)
from rollflow.nodes.connectors.add_observations_from_episodes_to_batch import AddObservationsFromEpisodesToBatch
from rollflow.nodes.connectors.batch_individual_items import BatchIndividualItems
from rollflow.nodes.connectors.connector_pipeline_v2 import ConnectorPipelineV2
from rollflow.nodes.connectors.connector_v2 import ConnectorV2
from rollflow.nodes.connectors.env_to_module_pipeline import EnvToModulePipeline
from rollflow.nodes.connectors.general_advantage_estimation import GeneralAdvantageEstimation
from rollflow.nodes.connectors.get_actions import GetActions
from rollflow.nodes.connectors.learner_connector_pipeline import LearnerConnectorPipeline
from rollflow.nodes.connectors.listify_data_for_vector_env import ListifyDataForVectorEnv
from rollflow.nodes.connectors.module_to_env_pipeline import ModuleToEnvPipeline
from rollflow.nodes.connectors.normalize_and_clip_actions import NormalizeAndClipActions
from rollflow.nodes.connectors.numpy_to_tensor import NumpyToTensor
from rollflow.nodes.connectors.tensor_to_numpy import TensorToNumpy
from rollflow.nodes.connectors.unbatch_to_individual_items import UnBatchToIndividualItems
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
from rollflow.nodes.module_forward import GatheringForward, ModuleForward
from rollflow.nodes.module_to_env import ModuleToEnv
from rollflow.nodes.policy_weights import PolicyWeights
from rollflow.nodes.rl_module import RLModule
from rollflow.nodes.rollout import Rollout

__all__ = [
    "AddColumnsFromEpisodesToBatch",
    "AddColumnsFromEpisodesToTrainBatch",
    "AddObservationsFromEpisodesToBatch",
    "BatchIndividualItems",
    "Bernoulli",
    "Categorical",
    "ConnectorPipelineV2",
    "ConnectorV2",
    "Deterministic",
    "DiagGaussian",
    "EnvToModule",
    "EnvToModulePipeline",
    "Environments",
    "EpisodeReturns",
    "GatheringForward",
    "GeneralAdvantageEstimation",
    "GetActions",
    "LagBound",
    "LearnerConnectorPipeline",
    "ListifyDataForVectorEnv",
    "ModuleForward",
    "ModuleToEnv",
    "ModuleToEnvPipeline",
    "MultiCategorical",
    "MultiDistribution",
    "NormalizeAndClipActions",
    "NumpyToTensor",
    "PolicyWeights",
    "RLModule",
    "Rollout",
    "TensorToNumpy",
    "UnBatchToIndividualItems",
    "distribution_for",
]
