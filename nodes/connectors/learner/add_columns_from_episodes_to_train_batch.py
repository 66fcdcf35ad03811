"""Everything but the observations out of the episodes."""

from typing import Any

import numpy as np

from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes
from rollflow.stream.columns import Columns
from rollflow.stream.episode import SingleAgentEpisode
from rollflow.stream.fragment_episodes import FragmentEpisodes


class AddColumnsFromEpisodesToTrainBatch(ConnectorV2):
    """Adds `actions`, `rewards`, `terminateds`, `truncateds` and the extra model outputs, one row per step.

    `state_out` is left out, and infos are. Columns that the batch has already stay as they are. The flags are True in
    an episode's last row only.
    """

    columnar = True
    changes_episodes = False

    def __call__(
        self,
        *,
        rl_module: Any,
        batch: Batch,
        episodes: Episodes,
        explore: bool | None = None,
        shared_data: dict[str, Any] | None = None,
        metrics: Any = None,
        **kwargs: Any,
    ) -> Batch:
        recorded = (Columns.ACTIONS, Columns.REWARDS, Columns.TERMINATEDS, Columns.TRUNCATEDS)
        if isinstance(episodes, FragmentEpisodes):
            for column in (*recorded, *episodes.extra_columns):
                if column not in batch and column != Columns.STATE_OUT:
                    batch[column] = episodes.gather(column)
            return batch
        there = set(batch)
        for episode in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False):
            for column, items in _columns_of(episode).items():
                if column not in there:
                    self.add_n_batch_items(batch, column, items, len(episode), episode)
        return batch


AddColumnsFromEpisodesToBatch = AddColumnsFromEpisodesToTrainBatch
"""The name that an older page of RLlib's has for it."""


def _columns_of(episode: SingleAgentEpisode) -> dict[str, Any]:
    last = np.arange(len(episode)) == len(episode) - 1
    return {
        Columns.ACTIONS: episode.get_actions(),
        Columns.REWARDS: np.asarray(episode.get_rewards(), np.float32),
        Columns.TERMINATEDS: last & episode.is_terminated,
        Columns.TRUNCATEDS: last & episode.is_truncated,
        **{
            key: episode.get_extra_model_outputs(key) for key in episode.extra_model_outputs if key != Columns.STATE_OUT
        },
    }
