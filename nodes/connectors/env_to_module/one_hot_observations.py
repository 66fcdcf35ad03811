"""Whole numbers in observations as one-hot vectors."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rollflow.nodes.connectors.agents import space_of_agent
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes
from rollflow.stream.errors import ConnectorError
from rollflow.stream.live_episode import LaneEpisodes
from rollflow.stream.space import one_hot
from rollflow.stream.tree import Tree


class OneHotObservations(ConnectorV2):
    """Rewrites Discrete and MultiDiscrete parts of every episode's last observation as one-hot vectors, f32[n].

    A MultiDiscrete's vectors are joined end to end; all other parts stay. Of several agents the space is a Dict by
    agent ids, or the same for all.
    """

    columnar = True
    changes_episodes = True

    def recompute_output_observation_space(
        self, input_observation_space: gym.Space[Any], input_action_space: gym.Space[Any]
    ) -> gym.Space[Any]:
        return _one_hot_space(input_observation_space)

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
        if isinstance(episodes, LaneEpisodes):
            episodes.set_observations(self._vectors(episodes.observations()))
            return batch
        for episode in self.single_agent_episode_iterator(episodes):
            vectors = self._vectors(episode.get_observations(-1), episode.agent_id)
            episode.set_observations(new_data=vectors, at_indices=-1)
            episode.observation_space = space_of_agent(self.observation_space, episode.agent_id)
        return batch

    def _vectors(self, observations: Tree, agent_id: Any = None) -> Tree:
        if self.input_observation_space is None:
            raise ConnectorError("OneHotObservations has no input observation space: give it one, or a pipeline")
        return one_hot(space_of_agent(self.input_observation_space, agent_id), observations)


def _one_hot_space(space: gym.Space[Any]) -> gym.Space[Any]:
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: _one_hot_space(part) for key, part in space.items()})
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([_one_hot_space(part) for part in space])
    if isinstance(space, spaces.Discrete):
        return spaces.Box(0.0, 1.0, (int(space.n),), np.float32)
    if isinstance(space, spaces.MultiDiscrete):
        return spaces.Box(0.0, 1.0, (int(space.nvec.sum()),), np.float32)
    return space
