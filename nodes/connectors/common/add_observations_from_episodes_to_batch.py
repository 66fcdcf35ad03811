"""Observations out of the episodes."""

from typing import Any

import gymnasium as gym

from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes
from rollflow.stream.columns import Columns
from rollflow.stream.fragment_episodes import FragmentEpisodes
from rollflow.stream.live_episode import LaneEpisodes

LAST_OBSERVATIONS = "last_observations"
"""Where `shared_data` has what a learner piece made of each chunk's last observation, a tree of arrays `any[C, ...]`.

A piece that makes the train batch's `obs` itself leaves it there for those that need a value of what comes after.
"""


class AddObservationsFromEpisodesToBatch(ConnectorV2):
    """Adds `obs`: each episode's last observation; before a learner, all of its observations but the last.

    as_learner_connector    which of the two

    A batch that has `obs` already stays as it is.
    """

    columnar = True
    changes_episodes = False

    def __init__(
        self,
        input_observation_space: gym.Space[Any] | None = None,
        input_action_space: gym.Space[Any] | None = None,
        *,
        as_learner_connector: bool = False,
    ) -> None:
        super().__init__(input_observation_space, input_action_space)
        self.as_learner_connector = as_learner_connector

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
        if Columns.OBS in batch:
            return batch
        if isinstance(episodes, LaneEpisodes) and not self.as_learner_connector:
            batch[Columns.OBS] = episodes.observations()
        elif isinstance(episodes, FragmentEpisodes) and self.as_learner_connector:
            batch[Columns.OBS] = episodes.gather(Columns.OBS)
        else:
            self._add_items(batch, episodes)
        return batch

    def _add_items(self, batch: Batch, episodes: Episodes) -> None:
        for episode in self.single_agent_episode_iterator(
            episodes, agents_that_stepped_only=not self.as_learner_connector
        ):
            if self.as_learner_connector:
                observations = episode.get_observations(slice(0, len(episode)))
                self.add_n_batch_items(batch, Columns.OBS, observations, len(episode), episode)
            else:
                self.add_batch_item(batch, Columns.OBS, episode.get_observations(-1), episode)
