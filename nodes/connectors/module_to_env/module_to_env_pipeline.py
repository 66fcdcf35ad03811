"""From the module's output to the environments."""

from collections.abc import Sequence
from typing import Any, Self

import gymnasium as gym

from rollflow.nodes.connectors.common.tensor_to_numpy import TensorToNumpy
from rollflow.nodes.connectors.connector_pipeline_v2 import ConnectorPipelineV2
from rollflow.nodes.connectors.connector_v2 import ConnectorV2
from rollflow.nodes.connectors.module_to_env.get_actions import GetActions
from rollflow.nodes.connectors.module_to_env.listify_data_for_vector_env import ListifyDataForVectorEnv
from rollflow.nodes.connectors.module_to_env.module_to_agent_unmapping import ModuleToAgentUnmapping
from rollflow.nodes.connectors.module_to_env.normalize_and_clip_actions import NormalizeAndClipActions
from rollflow.nodes.connectors.module_to_env.remove_single_ts_time_rank_from_batch import (
    RemoveSingleTsTimeRankFromBatch,
)
from rollflow.nodes.connectors.module_to_env.unbatch_to_individual_items import UnBatchToIndividualItems


class ModuleToEnvPipeline(ConnectorPipelineV2):
    """Makes actions for the environments out of a forward pass's output."""

    @classmethod
    def default(
        cls,
        observation_space: gym.Space[Any] | None = None,
        action_space: gym.Space[Any] | None = None,
        custom_pieces: Sequence[ConnectorV2] = (),
        *,
        normalize_actions: bool = False,
        clip_actions: bool = True,
        stateful: bool = False,
        multi_agent: bool = False,
    ) -> Self:
        """Sampling, arrays, items one by one, `custom_pieces`, and the actions brought into their bounds.

        normalize_actions, clip_actions    as `NormalizeAndClipActions` has them
        stateful                           the module's output has a time axis
        multi_agent                        the module's output is by module ids
        """
        return cls(
            observation_space,
            action_space,
            connectors=[
                GetActions(),
                TensorToNumpy(),
                UnBatchToIndividualItems(),
                *([ModuleToAgentUnmapping()] if multi_agent else []),
                *([RemoveSingleTsTimeRankFromBatch()] if stateful else []),
                *custom_pieces,
                NormalizeAndClipActions(normalize_actions=normalize_actions, clip_actions=clip_actions),
                ListifyDataForVectorEnv(),
            ],
        )
