"""From environments to the module's forward pass."""

from collections.abc import Sequence
from typing import Any, Self

import gymnasium as gym

from rollflow.nodes.connectors.common.add_observations_from_episodes_to_batch import AddObservationsFromEpisodesToBatch
from rollflow.nodes.connectors.common.add_states_from_episodes_to_batch import AddStatesFromEpisodesToBatch
from rollflow.nodes.connectors.common.add_time_dim_to_batch_and_zero_pad import AddTimeDimToBatchAndZeroPad
from rollflow.nodes.connectors.common.agent_to_module_mapping import AgentToModuleMapping
from rollflow.nodes.connectors.common.batch_individual_items import BatchIndividualItems
from rollflow.nodes.connectors.common.numpy_to_tensor import NumpyToTensor
from rollflow.nodes.connectors.connector_pipeline_v2 import ConnectorPipelineV2
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes


class EnvToModulePipeline(ConnectorPipelineV2):
    """Makes the batch for a forward pass out of the ongoing episodes, one per slot."""

    @classmethod
    def default(
        cls,
        observation_space: gym.Space[Any] | None = None,
        action_space: gym.Space[Any] | None = None,
        custom_pieces: Sequence[ConnectorV2] = (),
        *,
        stateful: bool = False,
        multi_agent: bool = False,
        device: Any = None,
    ) -> Self:
        """`custom_pieces`, then what every rollout needs: observations, batched, as tensors.

        stateful       with a time axis and `state_in`, for a stateful module
        multi_agent    by module ids
        device         where the tensors are to be
        """
        return cls(
            observation_space,
            action_space,
            connectors=[
                *custom_pieces,
                AddObservationsFromEpisodesToBatch(),
                *([AddTimeDimToBatchAndZeroPad(), AddStatesFromEpisodesToBatch()] if stateful else []),
                *([AgentToModuleMapping()] if multi_agent else []),
                BatchIndividualItems(multi_agent=multi_agent),
                NumpyToTensor(device=device, pin_memory=str(device).startswith("cuda")),
            ],
        )

    def __call__(  # type: ignore[override]  # RLlib's, too, lets callers leave out what goes without saying
        self,
        *,
        rl_module: Any,
        episodes: Episodes,
        explore: bool | None,
        batch: Batch | None = None,
        shared_data: dict[str, Any] | None = None,
        metrics: Any = None,
        **kwargs: Any,
    ) -> Batch:
        return super().__call__(
            rl_module=rl_module,
            batch={} if batch is None else batch,
            episodes=episodes,
            explore=explore,
            shared_data=shared_data,
            metrics=metrics,
            **kwargs,
        )
