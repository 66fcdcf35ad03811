"""Observations rewritten by a method that a user overrides: one by one, or those of all agents at once."""

import abc
import inspect
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
from gymnasium import spaces

from rollflow.nodes.connectors.agents import space_of_agent
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes
from rollflow.stream.episode import SingleAgentEpisode
from rollflow.stream.errors import ConnectorError
from rollflow.stream.multi_agent_episode import MultiAgentEpisode


class SingleAgentObservationPreprocessor(ConnectorV2):
    """Rewrites every episode's last observation by `preprocess`, which a subclass overrides.

    The batch stays as it is: a default piece takes the rewritten observation from the episode. A subclass that changes
    an observation's shape or dtype says so by `recompute_output_observation_space`. Of several agents the space is a
    Dict by agent ids, or the same for all; each agent that has an observation at its episode's last env step is an
    `episode` of its own.
    """

    def __init__(
        self,
        input_observation_space: gym.Space[Any] | None = None,
        input_action_space: gym.Space[Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(input_observation_space, input_action_space, **kwargs)
        parameters = inspect.signature(self.preprocess).parameters
        # An older page of RLlib's has `preprocess(observation)` alone.
        self._takes_episode = "episode" in parameters or any(
            parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
        )

    @abc.abstractmethod
    def preprocess(self, observation: Any, episode: SingleAgentEpisode) -> Any:
        """The observation that takes the place of `observation`, the last one of `episode`."""

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
        preprocess: Any = self.preprocess
        for episode in self.single_agent_episode_iterator(episodes):
            observation = episode.get_observations(-1)
            if self._takes_episode:
                observation = preprocess(observation=observation, episode=episode)
            else:
                observation = preprocess(observation)
            if observation is None:
                raise ConnectorError(f"{self.name}: preprocess gave None, expected the observation: does it return it?")
            episode.set_observations(new_data=observation, at_indices=-1)
            if self.observation_space is not None:
                episode.observation_space = space_of_agent(self.observation_space, episode.agent_id)
        return batch


class MultiAgentObservationPreprocessor(ConnectorV2):
    """Rewrites what the agents of every multi-agent episode observed last, all at once, by `preprocess`.

    A subclass overrides that. The batch stays as it is: a default piece takes the rewritten observations from the
    episodes. A subclass that changes an observation's shape or dtype says so by `recompute_output_observation_space`,
    which returns a Dict space by agent ids, or a space that is the same for all; it becomes the episodes', too.

    Raises ConnectorError for an episode of a single agent, and for observations of agents that had none.
    """

    @abc.abstractmethod
    def preprocess(self, observations: dict[Any, Any], episode: MultiAgentEpisode) -> Mapping[Any, Any]:
        """What takes the place of `observations`, agent id -> the one at the last env step of `episode`.

        Agents that are left out keep theirs.
        """

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
        for episode in episodes:
            if not isinstance(episode, MultiAgentEpisode):
                raise ConnectorError(f"{self.name}: episode '{episode.id_}' is of a single agent, expected several")
            observations = episode.get_observations(-1)
            made = self.preprocess(observations=dict(observations), episode=episode)
            without = [agent_id for agent_id in made if agent_id not in observations]
            if without:
                there = ", ".join(map(str, observations)) or "none"
                raise ConnectorError(
                    f"{self.name}: preprocess gave an observation of agent {', '.join(map(repr, without))} of episode "
                    f"'{episode.id_}' at env step {episode.env_t}, expected only of those that had one: {there}"
                )
            episode.set_observations(new_data=made, at_indices=-1)
            if self.observation_space is not None:
                self._set_spaces(episode, self.observation_space)
        return batch

    @staticmethod
    def _set_spaces(episode: MultiAgentEpisode, space: gym.Space[Any]) -> None:
        episode.observation_space = {agent_id: space_of_agent(space, agent_id) for agent_id in episode.agent_ids}
        if isinstance(space, spaces.Dict) and episode.agent_ids <= space.spaces.keys():
            episode.observation_space = space
        for agent_id, each in episode.agent_episodes.items():
            each.observation_space = space_of_agent(space, agent_id)


ObservationPreprocessor = SingleAgentObservationPreprocessor
"""The name that an older page of RLlib's has for it."""
