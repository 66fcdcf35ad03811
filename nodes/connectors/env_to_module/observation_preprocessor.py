"""Observations rewritten one by one, by a method that a user overrides."""

import abc
import inspect
from typing import Any

import gymnasium as gym

from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes
from rollflow.stream.episode import SingleAgentEpisode


class SingleAgentObservationPreprocessor(ConnectorV2):
    """Rewrites every episode's last observation by `preprocess`, which a subclass overrides.

    The batch stays as it is: a default piece takes the rewritten observation from the episode. A subclass that changes
    an observation's shape or dtype says so by `recompute_output_observation_space`.
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
            episode.set_observations(new_data=observation, at_indices=-1)
            if self.observation_space is not None:
                episode.observation_space = self.observation_space
        return batch


ObservationPreprocessor = SingleAgentObservationPreprocessor
"""The name that an older page of RLlib's has for it."""
