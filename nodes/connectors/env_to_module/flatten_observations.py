"""Observations as vectors."""

from collections.abc import Collection
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rollflow.nodes.connectors.agents import single_agent_episodes, space_by_agents, space_of_agent
from rollflow.nodes.connectors.by_module import module_by_module
from rollflow.nodes.connectors.common.add_observations_from_episodes_to_batch import LAST_OBSERVATIONS
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes
from rollflow.stream.columns import Columns
from rollflow.stream.errors import ConnectorError
from rollflow.stream.fragment_episodes import FragmentEpisodes
from rollflow.stream.live_episode import LaneEpisodes
from rollflow.stream.space import flat_size, flatten, is_columnar
from rollflow.stream.tree import Tree, map_tree, stack_trees


class FlattenObservations(ConnectorV2):
    """Rewrites every episode's last observation as a vector, f32[D]; before a learner, adds `obs`, f32[B, D].

        multi_agent             whether the spaces are Dicts by agent ids, as those of several agents are
        agent_ids               the agents whose observations are flattened; None: all
        as_learner_connector    which of the two. With the piece in the env-to-module pipeline the episodes'
                                observations are flat already
        keys_to_remove          keys of a Dict space that are left out

    A Dict's parts come by sorted key, a Tuple's in order; Discrete and MultiDiscrete ones as one-hot vectors.

    Raises ConnectorError for a space that has no numbers in it, and for keys that it does not have.
    """

    columnar = True
    changes_episodes = True

    def __init__(
        self,
        input_observation_space: gym.Space[Any] | None = None,
        input_action_space: gym.Space[Any] | None = None,
        *,
        multi_agent: bool = False,
        agent_ids: Collection[Any] | None = None,
        as_learner_connector: bool = False,
        keys_to_remove: Collection[str] | None = None,
    ) -> None:
        super().__init__(input_observation_space, input_action_space)
        self.multi_agent = multi_agent
        self.agent_ids = agent_ids
        self.as_learner_connector = as_learner_connector
        self.keys_to_remove = list(keys_to_remove or ())

    def recompute_output_observation_space(
        self, input_observation_space: gym.Space[Any], input_action_space: gym.Space[Any]
    ) -> gym.Space[Any]:
        if self.multi_agent:
            return space_by_agents(input_observation_space, None, lambda part, _, agent_id: self._made(part, agent_id))
        return self._flat_space(input_observation_space)

    @module_by_module
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
        if self.as_learner_connector:
            if Columns.OBS not in batch and len(episodes):
                self._add_flat(batch, episodes, {} if shared_data is None else shared_data)
            return batch
        if isinstance(episodes, LaneEpisodes):
            episodes.set_observations(self._flat(episodes.observations()))
            return batch
        for episode in self.single_agent_episode_iterator(episodes):
            if self._concerns(episode.agent_id):
                flat = self._flat(episode.get_observations(-1), episode.agent_id)
                episode.set_observations(new_data=flat, at_indices=-1)
                episode.observation_space = space_of_agent(self.observation_space, episode.agent_id)
        return batch

    def _add_flat(self, batch: Batch, episodes: Episodes, shared_data: dict[str, Any]) -> None:
        if isinstance(episodes, FragmentEpisodes):
            batch[Columns.OBS] = self._flat(episodes.gather(Columns.OBS))
            shared_data[LAST_OBSERVATIONS] = self._flat(episodes.last_observations())
            return
        last = []
        for episode in single_agent_episodes(episodes, stepped_only=False):
            made = [episode.get_observations(t) for t in range(len(episode) + 1)]
            if self._concerns(episode.agent_id):
                made = [self._flat(each, episode.agent_id) for each in made]
            last.append(made.pop())
            self.add_n_batch_items(batch, Columns.OBS, made, len(made), episode)
        shared_data[LAST_OBSERVATIONS] = stack_trees(last)

    def _concerns(self, agent_id: Any) -> bool:
        """Whether the observations of an agent, or of a single one, are flattened."""
        return self.agent_ids is None or agent_id is None or agent_id in self.agent_ids

    def _flat(self, observations: Tree, agent_id: Any = None) -> Any:
        space = self.input_observation_space
        if space is None:
            raise ConnectorError("FlattenObservations has no input observation space: give it one, or a pipeline")
        if self.multi_agent:
            space = space_of_agent(space, agent_id)
        return flatten(self._kept(space), map_tree(np.asarray, observations))

    def _made(self, space: gym.Space[Any], agent_id: Any) -> gym.Space[Any]:
        return self._flat_space(space) if self._concerns(agent_id) else space

    def _flat_space(self, space: gym.Space[Any]) -> gym.Space[Any]:
        return spaces.Box(-np.inf, np.inf, (flat_size(self._kept(space)),), np.float32)

    def _kept(self, space: gym.Space[Any]) -> gym.Space[Any]:
        if not is_columnar(space):
            raise ConnectorError(
                f"FlattenObservations can't flatten observations in {space}; expected Box, Discrete, MultiDiscrete, "
                "MultiBinary, or a Dict or Tuple of those"
            )
        if not self.keys_to_remove:
            return space
        keys = sorted(space.keys()) if isinstance(space, spaces.Dict) else []
        unknown = [key for key in self.keys_to_remove if key not in keys]
        if unknown or not isinstance(space, spaces.Dict):
            raise ConnectorError(f"FlattenObservations: keys_to_remove has {unknown}, but {space} has keys: {keys}")
        if set(keys) == set(self.keys_to_remove):
            raise ConnectorError(
                f"FlattenObservations: keys_to_remove has all keys of {space}, expected at least one left"
            )
        return spaces.Dict({key: part for key, part in space.items() if key not in self.keys_to_remove})
