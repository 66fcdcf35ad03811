"""The last few actions and rewards beside each observation."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rollflow.nodes.connectors.agents import space_by_agents, space_of_agent
from rollflow.nodes.connectors.checked import checked_count
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes
from rollflow.stream.columns import Columns
from rollflow.stream.episode import SingleAgentEpisode
from rollflow.stream.errors import ConnectorError
from rollflow.stream.live_episode import LaneEpisodes
from rollflow.stream.space import flat_size, flatten, is_columnar
from rollflow.stream.tree import map_tree, stack_trees


class PrevActionsPrevRewards(ConnectorV2):
    """Rewrites every episode's last observation as a dict of itself and what the last steps did and earned.

        multi_agent       whether the spaces are Dicts by agent ids, as those of several agents are
        n_prev_actions    actions, 0 or more; with 0 that part is left out
        n_prev_rewards    rewards, 0 or more; likewise

    The parts, oldest step first, zeros where the episode has no such step:

        _orig_obs         the observation as it was
        prev_n_actions    f32[n_prev_actions * D]: each action as a vector, one-hot where it is a whole number
        prev_n_rewards    f32[n_prev_rewards]

    Raises ConnectorError for an action space without numbers, ValueError for counts below 0.
    """

    ORIG_OBS_KEY = "_orig_obs"
    PREV_ACTIONS_KEY = "prev_n_actions"
    PREV_REWARDS_KEY = "prev_n_rewards"

    columnar = True
    changes_episodes = True

    def __init__(
        self,
        input_observation_space: gym.Space[Any] | None = None,
        input_action_space: gym.Space[Any] | None = None,
        *,
        multi_agent: bool = False,
        n_prev_actions: int = 1,
        n_prev_rewards: int = 1,
    ) -> None:
        super().__init__(input_observation_space, input_action_space)
        self.multi_agent = multi_agent
        self.n_prev_actions = checked_count("n_prev_actions", n_prev_actions, 0)
        self.n_prev_rewards = checked_count("n_prev_rewards", n_prev_rewards, 0)
        self.lookback = max(self.n_prev_actions, self.n_prev_rewards)

    def recompute_output_observation_space(
        self, input_observation_space: gym.Space[Any], input_action_space: gym.Space[Any]
    ) -> gym.Space[Any]:
        if self.multi_agent:
            return space_by_agents(input_observation_space, input_action_space, self._made)
        return self._made(input_observation_space, input_action_space)

    def _made(self, observation_space: gym.Space[Any], action_space: Any, agent_id: Any = None) -> gym.Space[Any]:
        parts: dict[str, gym.Space[Any]] = {self.ORIG_OBS_KEY: observation_space}
        if self.n_prev_actions and action_space is not None:  # it is told of one space after the other
            if not is_columnar(action_space):
                raise ConnectorError(
                    f"PrevActionsPrevRewards can't show actions in {action_space}; expected an action space of "
                    "Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of those"
                )
            width = self.n_prev_actions * flat_size(action_space)
            numbered = isinstance(action_space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary)
            low, high = (0.0, 1.0) if numbered else (-np.inf, np.inf)
            parts[self.PREV_ACTIONS_KEY] = spaces.Box(low, high, (width,), np.float32)
        if self.n_prev_rewards:
            parts[self.PREV_REWARDS_KEY] = spaces.Box(-np.inf, np.inf, (self.n_prev_rewards,), np.float32)
        return spaces.Dict(parts)

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
        if self.input_action_space is None:
            raise ConnectorError("PrevActionsPrevRewards has no input action space: give it one, or a pipeline")
        if isinstance(episodes, LaneEpisodes):
            episodes.set_observations(self._of_lane(episodes))
            return batch
        for episode in self.single_agent_episode_iterator(episodes):
            episode.set_observations(new_data=self._of_episode(episode), at_indices=-1)
            episode.observation_space = space_of_agent(self.observation_space, episode.agent_id)
        return batch

    def _of_lane(self, episodes: LaneEpisodes) -> dict[str, Any]:
        parts: dict[str, Any] = {self.ORIG_OBS_KEY: episodes.observations()}
        if self.n_prev_actions:
            actions = flatten(self._action_space_of(None), episodes.recent(Columns.ACTIONS, self.n_prev_actions))
            there = episodes.steps_there(self.n_prev_actions)
            actions[~there] = 0.0
            parts[self.PREV_ACTIONS_KEY] = actions.reshape(len(actions), -1)
        if self.n_prev_rewards:
            parts[self.PREV_REWARDS_KEY] = episodes.recent(Columns.REWARDS, self.n_prev_rewards)
        return parts

    def _of_episode(self, episode: SingleAgentEpisode) -> dict[str, Any]:
        parts: dict[str, Any] = {self.ORIG_OBS_KEY: episode.get_observations(-1)}
        steps = len(episode) + episode.rewards.lookback
        action_space = self._action_space_of(episode.agent_id)
        if self.n_prev_actions:
            vectors = np.zeros((self.n_prev_actions, flat_size(action_space)), np.float32)
            there = min(steps, self.n_prev_actions)
            if there:
                items = [map_tree(np.asarray, episode.get_actions(i)) for i in range(-there, 0)]
                vectors[-there:] = flatten(action_space, stack_trees(items))
            parts[self.PREV_ACTIONS_KEY] = vectors.reshape(-1)
        if self.n_prev_rewards:
            rewards: NDArray[np.float32] = np.zeros(self.n_prev_rewards, np.float32)
            there = min(steps, self.n_prev_rewards)
            if there:
                rewards[-there:] = [episode.get_rewards(i) for i in range(-there, 0)]
            parts[self.PREV_REWARDS_KEY] = rewards
        return parts

    def _action_space_of(self, agent_id: Any) -> gym.Space[Any]:
        space = self.input_action_space
        assert space is not None
        return space_of_agent(space, agent_id) if self.multi_agent else space
