"""Infos out of the episodes."""

from typing import Any

import numpy as np

from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes
from rollflow.stream.columns import Columns
from rollflow.stream.fragment import Fragment
from rollflow.stream.fragment_episodes import FragmentEpisodes
from rollflow.stream.infos import info_of


class AddInfosFromEpisodesToTrainBatch(ConnectorV2):
    """Adds `infos`, a list of B dicts: what came with the observation before every step.

    A batch that has `infos` already stays as it is.
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
        if Columns.INFOS in batch or not len(episodes):
            return batch
        if isinstance(episodes, FragmentEpisodes):
            batch[Columns.INFOS] = [info for fragment in episodes.fragments for info in _infos_of(fragment)]
            return batch
        for episode in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False):
            infos = list(episode.get_infos(slice(0, len(episode))))
            self.add_n_batch_items(batch, Columns.INFOS, infos, len(episode), episode)
        return batch


def _infos_of(fragment: Fragment) -> list[dict[str, Any]]:
    """The info dict before every step, chunk by chunk."""
    slots = fragment.layout.num_slots
    places = fragment.in_chunk_order(np.arange(fragment.num_rows * slots).reshape(fragment.num_rows, slots))
    rows, slot = np.divmod(places, slots)
    rows += fragment.first_row
    return [info_of(fragment.infos[row], at) for row, at in zip(rows.tolist(), slot.tolist(), strict=True)]
