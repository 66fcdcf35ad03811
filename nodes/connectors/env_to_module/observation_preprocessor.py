"""Base classes for pieces that rewrite observations: one by one, or those of all agents at once."""

import abc
import inspect
from collections.abc import Mapping
from itertools import islice
from typing import Any

from gymnasium import spaces

from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes, Space
from rollflow.nodes.connectors.list_form import rewrite_last
from rollflow.nodes.connectors.spaces import space_of_agent
from rollflow.stream.data.errors import ConnectorError
from rollflow.stream.data.tree import Tree
from rollflow.stream.episodes.multi_agent import MultiAgentEpisode
from rollflow.stream.episodes.single_agent import SingleAgentEpisode
from rollflow.stream.fragments.live_episode import LaneEpisodes


class ObservationRewriter(ConnectorV2):
    """Base of pieces that rewrite every episode's last observation.

    A subclass overrides `rewritten`, or `of_lane` and `of_episode` where other columns are needed as well.
    """

    columnar = True

    def rewritten(self, observations: Tree, agent_id: Any = None) -> Tree:
        """One observation, or those of all slots, a tree of arrays `any[N, ...]`, as they are to be.

        agent_id    of one of several agents
        """
        raise NotImplementedError

    def of_lane(self, episodes: LaneEpisodes) -> Tree:
        """The last observations of all slots as they are to be, a tree of arrays `any[N, ...]`."""
        return self.rewritten(episodes.newest())

    def of_episode(self, episode: SingleAgentEpisode) -> Tree:
        """The last observation of an episode as it is to be."""
        return self.rewritten(episode.get_observations(-1), episode.agent_id)

    def __call__(self, *, batch: Batch, episodes: Episodes, **kwargs: Any) -> Batch:
        if isinstance(episodes, LaneEpisodes):
            episodes.set_observations(self.of_lane(episodes))
            return batch
        for episode in self.single_agent_episode_iterator(episodes):
            rewrite_last(episode, self.of_episode(episode), self.observation_space)
        return batch


class SingleAgentObservationPreprocessor(ObservationRewriter):
    """Rewrites every episode's last observation by `preprocess`, which a subclass overrides.

    The batch stays as it is: a default piece takes the rewritten observation from the episode. A subclass that changes
    an observation's shape or dtype declares it by `recompute_output_observation_space`.

    Of several agents the space is a Dict by agent ids, or the same for all. Each agent that has an observation at its
    episode's last env step is an `episode` of its own.
    """

    columnar = False

    def __init__(
        self, input_observation_space: Space | None = None, input_action_space: Space | None = None, **kwargs: Any
    ) -> None:
        super().__init__(input_observation_space, input_action_space, **kwargs)
        parameters = inspect.signature(self.preprocess).parameters
        kinds = {parameter.kind for parameter in parameters.values()}
        # RLlib's older form is `preprocess(observation)` alone. The second parameter may have another name than here.
        second = next(islice(parameters.values(), 1, None), None)
        self._by_place = (
            second is not None
            and second.kind in (second.POSITIONAL_ONLY, second.POSITIONAL_OR_KEYWORD)
            and (second.default is second.empty or second.name == "episode")
        )
        self._by_name = "episode" in parameters or inspect.Parameter.VAR_KEYWORD in kinds

    @abc.abstractmethod
    def preprocess(self, observation: Any, episode: SingleAgentEpisode) -> Any:
        """Return the replacement of `observation`, the last one of `episode`."""

    def of_episode(self, episode: SingleAgentEpisode) -> Any:
        preprocess: Any = self.preprocess
        observation = episode.get_observations(-1)
        if self._by_place:
            made = preprocess(observation, episode)
        else:
            made = preprocess(observation, episode=episode) if self._by_name else preprocess(observation)
        if made is None:
            raise ConnectorError(f"{self.name}: preprocess gave None, expected the observation: does it return it?")
        return made


class MultiAgentObservationPreprocessor(ConnectorV2):
    """Rewrites the last observations of every multi-agent episode's agents, all at once, by `preprocess`.

    A subclass overrides `preprocess`. The batch stays as it is: a default piece takes the rewritten observations from
    the episodes. A subclass that changes a shape or dtype overrides `recompute_output_observation_space`. It returns a
    Dict space by agent ids, or a space that is the same for all; the episodes get it, too.

    Raises ConnectorError for an episode of a single agent, and for observations of agents that had none.
    """

    @abc.abstractmethod
    def preprocess(self, observations: dict[Any, Any], episode: MultiAgentEpisode) -> Mapping[Any, Any]:
        """Return replacements of `observations`, agent id -> the one at the last env step of `episode`.

        Agents that are left out keep theirs.
        """

    def __call__(self, *, batch: Batch, episodes: Episodes, **kwargs: Any) -> Batch:
        for episode in episodes:
            if not isinstance(episode, MultiAgentEpisode):
                raise ConnectorError(f"{self.name}: episode '{episode.id_}' is of a single agent, expected several")
            observations = episode.get_observations(-1)
            made = self.preprocess(dict(observations), episode)
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
    def _set_spaces(episode: MultiAgentEpisode, space: Space) -> None:
        episode.observation_space = {agent_id: space_of_agent(space, agent_id) for agent_id in episode.agent_ids}
        if isinstance(space, spaces.Dict) and episode.agent_ids <= space.spaces.keys():
            episode.observation_space = space
        for agent_id, each in episode.agent_episodes.items():
            each.observation_space = space_of_agent(space, agent_id)


ObservationPreprocessor = SingleAgentObservationPreprocessor
"""Its older name in RLlib."""
