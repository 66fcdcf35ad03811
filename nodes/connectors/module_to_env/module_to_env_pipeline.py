"""From the module's output to the environments."""

from collections.abc import Sequence
from time import perf_counter_ns
from typing import Any, Self

import gymnasium as gym

from rollflow.nodes.connectors.common.tensor_to_numpy import TensorToNumpy
from rollflow.nodes.connectors.connector_pipeline_v2 import ConnectorPipelineV2
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2
from rollflow.nodes.connectors.fused import sampled_jointly
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

    def run_jointly(
        self, rl_module: Any, batch: Batch, sizes: Sequence[int], explore: bool, shared_data: Sequence[dict[str, Any]]
    ) -> Batch | None:
        """What `run` gives for several lanes, in one batch as `batch` is: the rows of one lane after those of another.

        sizes, shared_data    of each lane

        None where that can't be, and each lane's rows are to be run by themselves: for other pieces than the default
        ones, and what they do not fuse.
        """
        if self._fused_from != 0 or not self.fuses:
            return None
        mark = perf_counter_ns()
        given = sampled_jointly(self.connectors, rl_module, batch, sizes, explore, shared_data)
        if given is not None:
            self._fused_calls += len(sizes)
            self._fused_ns += perf_counter_ns() - mark
        return given
