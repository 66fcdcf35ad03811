"""From episodes to a train batch."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Self

import gymnasium as gym
import numpy as np
import torch

from rollflow.nodes.connectors.agents import single_agent_episodes
from rollflow.nodes.connectors.common.add_observations_from_episodes_to_batch import AddObservationsFromEpisodesToBatch
from rollflow.nodes.connectors.common.add_states_from_episodes_to_batch import AddStatesFromEpisodesToBatch
from rollflow.nodes.connectors.common.add_time_dim_to_batch_and_zero_pad import AddTimeDimToBatchAndZeroPad
from rollflow.nodes.connectors.common.agent_to_module_mapping import AgentToModuleMapping
from rollflow.nodes.connectors.common.batch_individual_items import BatchIndividualItems
from rollflow.nodes.connectors.common.numpy_to_tensor import NumpyToTensor
from rollflow.nodes.connectors.connector_pipeline_v2 import ConnectorPipelineV2
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes
from rollflow.nodes.connectors.learner.add_columns_from_episodes_to_train_batch import (
    AddColumnsFromEpisodesToTrainBatch,
)
from rollflow.stream.columns import Columns
from rollflow.stream.errors import ConnectorError
from rollflow.stream.fragment import Fragment
from rollflow.stream.fragment_episodes import FragmentEpisodes
from rollflow.stream.multi_agent_episode import MultiAgentEpisode
from rollflow.stream.tree import leaves_of


class LearnerConnectorPipeline(ConnectorPipelineV2):
    """Makes a train batch out of episodes or chunks of them."""

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
        """`custom_pieces`, then what every learner needs: observations and all other columns, batched, as tensors.

        stateful       in rows of `max_seq_len` steps and with `state_in`, for a stateful module
        multi_agent    by module ids
        device         where the tensors are to be
        """
        states: list[ConnectorV2] = [
            AddTimeDimToBatchAndZeroPad(as_learner_connector=True),
            AddStatesFromEpisodesToBatch(as_learner_connector=True),
        ]
        return cls(
            observation_space,
            action_space,
            connectors=[
                *custom_pieces,
                AddObservationsFromEpisodesToBatch(as_learner_connector=True),
                AddColumnsFromEpisodesToTrainBatch(),
                *(states if stateful else []),
                *([AgentToModuleMapping(as_learner_connector=True)] if multi_agent else []),
                BatchIndividualItems(multi_agent=multi_agent),
                NumpyToTensor(device=device),
            ],
        )

    def of_fragments(self, fragments: Sequence[Fragment], rl_module: Any, metrics: Any = None) -> Batch:
        """The train batch of some fragments; the pieces' input spaces become those of what the fragments hold."""
        observation_space, action_space = fragments[0].observation_space, fragments[0].layout.action_space
        if observation_space is not self.input_observation_space or action_space is not self.input_action_space:
            self.set_input_spaces(observation_space, action_space)
        try:
            return self(rl_module=rl_module, episodes=FragmentEpisodes(fragments), metrics=metrics)
        except Exception as error:
            error.add_note("in the train batch of " + ", ".join(map(_told, fragments)))
            raise

    def __call__(
        self,
        *,
        rl_module: Any,
        episodes: Episodes,
        batch: Batch | None = None,
        explore: bool | None = False,
        shared_data: dict[str, Any] | None = None,
        metrics: Any = None,
        **kwargs: Any,
    ) -> Batch:
        if isinstance(episodes, FragmentEpisodes) and not len(episodes):
            episodes = []
        batch = super().__call__(
            rl_module=rl_module,
            batch={} if batch is None else batch,
            episodes=episodes,
            explore=explore,
            shared_data=shared_data,
            metrics=metrics,
            **kwargs,
        )
        _check_lengths(batch, episodes)
        return batch


def _check_lengths(batch: Batch, episodes: Episodes) -> None:
    """Raise ConnectorError unless every column has as many rows as `obs`, or one for each chunk."""
    if isinstance(episodes, FragmentEpisodes) or not any(isinstance(each, MultiAgentEpisode) for each in episodes):
        return _check_columns(batch, len(episodes))
    num_chunks = Counter(each.module_id for each in single_agent_episodes(episodes, stepped_only=False))
    for module, columns in batch.items():
        if isinstance(columns, dict) and module in num_chunks:
            _check_columns(columns, num_chunks[module], f" of module '{module}'")
    return None


def _check_columns(batch: Batch, num_chunks: int, of: str = "") -> None:
    rows = {
        column: len(leaves[0])
        for column, data in batch.items()
        if column != Columns.INFOS and (leaves := leaves_of(data)) and isinstance(leaves[0], np.ndarray | torch.Tensor)
    }
    expected = rows.get(Columns.OBS)
    for column, count in rows.items():
        if expected is not None and count not in (expected, num_chunks):
            raise ConnectorError(
                f"column '{column}'{of} has {count} rows beside '{Columns.OBS}' with {expected} of {num_chunks} "
                f"chunks, expected {expected}, or one for each chunk: a piece that adds a column adds it for every "
                "chunk"
            )


def _told(fragment: Fragment) -> str:
    first = fragment.sequence * fragment.layout.num_rows
    return f"lane {fragment.lane}, vector steps {first} to {first + fragment.num_rows}"
