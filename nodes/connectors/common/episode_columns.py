"""Pieces that add columns of the episodes to the batch: observations, and where they come from."""

from typing import Any

import numpy as np

from rollflow.nodes.connectors.common.by_module import ActingOrLearning
from rollflow.nodes.connectors.connector_v2 import Batch, Episodes
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ConnectorError
from rollflow.stream.episodes.single_agent import SingleAgentEpisode
from rollflow.stream.fragments.fragment import FragmentEpisodes
from rollflow.stream.fragments.live_episode import LaneEpisodes

LAST_OBSERVATIONS = "last_observations"
"""Key in `shared_data` of each chunk's last observation as a learner piece rewrote it, a tree of arrays `any[C, ...]`.

A piece that makes the train batch's `obs` itself sets it, for pieces that need the value of what comes after.
"""


class AddObservationsFromEpisodesToBatch(ActingOrLearning):
    """Adds `obs`, `any[B, ...]`: each episode's last observation; before a learner, all of them but the last.

    as_learner_connector    True before a learner

    A batch that has `obs` already stays as it is. In a rollout `obs` are the very rows that are recorded, read-only.
    """

    columnar = True

    def __call__(self, *, batch: Batch, episodes: Episodes, **kwargs: Any) -> Batch:
        if Columns.OBS in batch:
            return batch
        if isinstance(episodes, LaneEpisodes) and not self.as_learner_connector:
            batch[Columns.OBS] = episodes.observations()
        elif isinstance(episodes, FragmentEpisodes) and self.as_learner_connector:
            batch[Columns.OBS] = episodes.gather(Columns.OBS)
        else:
            self._add_of_episodes(batch, episodes, self._observations, learns=self.as_learner_connector)
        return batch

    def _observations(self, episode: SingleAgentEpisode) -> dict[str, Any]:
        at = slice(0, len(episode)) if self.as_learner_connector else -1
        return {Columns.OBS: episode.get_observations(at)}


class AddLaneAndSlotToBatch(ActingOrLearning):
    """Adds `lane` and `slot`, i64[B] each: the rollout's lane that a row is of, and its environment in the lane.

    as_learner_connector    True: a row for each step of the episodes; False: a row for each episode

    A module that needs to know where a row comes from reads them from its batch; nothing is recorded. With several
    agents `slot` is the environment's number in the lane. Raises ConnectorError for an episode of no rollout.
    """

    columnar = True

    def __call__(self, *, batch: Batch, episodes: Episodes, **kwargs: Any) -> Batch:
        if isinstance(episodes, LaneEpisodes) and not self.as_learner_connector:
            slots = episodes.env_slots()
            batch[Columns.LANE] = np.full(len(slots), episodes.lane.index, np.int64)
            batch[Columns.SLOT] = slots
        elif isinstance(episodes, FragmentEpisodes) and self.as_learner_connector:
            batch[Columns.LANE] = np.repeat(episodes.lanes, episodes.lengths)
            batch[Columns.SLOT] = np.repeat(episodes.env_slots(), episodes.lengths)
        else:
            self._add_of_episodes(batch, episodes, self._numbers, learns=self.as_learner_connector)
        return batch

    def _numbers(self, episode: SingleAgentEpisode) -> dict[str, Any]:
        numbers: dict[str, Any] = {Columns.LANE: episode.lane, Columns.SLOT: episode.slot}
        for column, number in numbers.items():
            if number is None:
                raise ConnectorError(
                    f"episode '{episode.id_}' has no {column}, expected an episode that a rollout hands out, and none "
                    "that was built by hand"
                )
        if not self.as_learner_connector:
            return {column: np.int64(number) for column, number in numbers.items()}
        return {column: np.full(len(episode), number, np.int64) for column, number in numbers.items()}
