"""Pieces that rewrite the last observations: as vectors, or with the last actions and rewards."""

import abc
import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rollflow.nodes.argument_checks import checked_count
from rollflow.nodes.connectors.common.batches import module_by_module
from rollflow.nodes.connectors.common.episode_columns import LAST_OBSERVATIONS
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes, SharedData, Space
from rollflow.nodes.connectors.list_form import is_keyed_by_episode, rewrite_last, single_agent_episodes
from rollflow.nodes.connectors.spaces import check_has_numbers, space_by_agents, space_of_agent
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ConnectorError
from rollflow.stream.data.space import ARRAYS, Numerics, flat_size, flatten, map_space, one_hot_items
from rollflow.stream.data.tree import Tree, map_tree, stack_trees, unstack_tree
from rollflow.stream.episodes.multi_agent import MultiAgentEpisode
from rollflow.stream.episodes.single_agent import SingleAgentEpisode
from rollflow.stream.fragments.fragment import FragmentEpisodes
from rollflow.stream.fragments.live_episode import LaneEpisodes


class ObservationRewriter(ConnectorV2):
    """Base of pieces that rewrite every episode's last observation.

    A subclass overrides `rewritten`, or `of_lane` and `of_episode` where other columns are needed as well.
    """

    columnar = True

    def rewritten(self, observations: Tree, agent_id: Any = None, numerics: Numerics = ARRAYS) -> Tree:
        """One observation, or those of all slots, a tree of arrays `any[N, ...]`, as they are to be.

        agent_id    of one of several agents
        numerics    of the observations: of arrays, or of tensors
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


class OneHotObservations(ObservationRewriter):
    """Rewrites Discrete and MultiDiscrete parts of every episode's last observation as one-hot vectors, f32[n].

    A MultiDiscrete's vectors are joined end to end; all other parts stay. Of several agents the space is a Dict by
    agent ids, or the same for all.
    """

    pipelines = ("env-to-module", "learner")

    def recompute_output_observation_space(self, input_observation_space: Space, input_action_space: Space) -> Space:
        return map_space(_one_hot_space, input_observation_space)

    def rewritten(self, observations: Tree, agent_id: Any = None, numerics: Numerics = ARRAYS) -> Tree:
        return one_hot_items(space_of_agent(self._needed_space("observation"), agent_id), observations, numerics[0])


def _one_hot_space(space: Space) -> Space:
    if isinstance(space, spaces.Discrete):
        return spaces.Box(0.0, 1.0, (int(space.n),), np.float32)
    if isinstance(space, spaces.MultiDiscrete):
        return spaces.Box(0.0, 1.0, (int(space.nvec.sum()),), np.float32)
    return space


@dataclass(kw_only=True, eq=False, repr=False)
class FlattenObservations(ObservationRewriter):
    """Rewrites every episode's last observation as a vector, f32[D]; before a learner, adds `obs`, f32[B, D].

        multi_agent             True where the spaces are Dicts by agent ids
        agent_ids               the agents whose observations are flattened; None: all
        as_learner_connector    True before a learner. With the piece in the env-to-module pipeline the episodes'
                                observations are flat already
        keys_to_remove          keys of a Dict space that are left out

    A Dict's parts come by sorted key, a Tuple's in order; Discrete and MultiDiscrete ones as one-hot vectors.

    Raises ConnectorError for a space that has no numbers in it, and for keys that it does not have.
    """

    columnar = True
    pipelines = ("env-to-module", "learner")

    multi_agent: bool = False
    agent_ids: Collection[Any] | None = None
    as_learner_connector: bool = False
    keys_to_remove: Collection[str] | None = None

    def __post_init__(self) -> None:
        self.keys_to_remove = list(self.keys_to_remove or ())

    def recompute_output_observation_space(self, input_observation_space: Space, input_action_space: Space) -> Space:
        if self.multi_agent:
            return space_by_agents(input_observation_space, None, lambda part, _, agent_id: self._made(part, agent_id))
        return self._flat_space(input_observation_space)

    @module_by_module
    def __call__(self, *, batch: Batch, episodes: Episodes, shared_data: SharedData = None, **kwargs: Any) -> Batch:
        if self.as_learner_connector:
            if Columns.OBS not in batch and len(episodes):
                self._add_flat(batch, episodes, {} if shared_data is None else shared_data)
            return batch
        if not isinstance(episodes, LaneEpisodes):
            episodes = [each for each in self.single_agent_episode_iterator(episodes) if self._concerns(each.agent_id)]
        return super().__call__(batch=batch, episodes=episodes)

    def _add_flat(self, batch: Batch, episodes: Episodes, shared_data: dict[str, Any]) -> None:
        if isinstance(episodes, FragmentEpisodes):
            batch[Columns.OBS] = self.rewritten(episodes.gather(Columns.OBS))
            shared_data[LAST_OBSERVATIONS] = self.rewritten(episodes.last_observations())
            return
        last = []
        for episode in single_agent_episodes(episodes, stepped_only=False):
            made = [self.rewritten(episode.get_observations(t), episode.agent_id) for t in range(len(episode) + 1)]
            last.append(made.pop())
            self.add_n_batch_items(batch, Columns.OBS, made, len(made), episode)
        shared_data[LAST_OBSERVATIONS] = stack_trees(last)

    def _concerns(self, agent_id: Any) -> bool:
        """True if the observations of an agent, or of a single one, are flattened."""
        return self.agent_ids is None or agent_id is None or agent_id in self.agent_ids

    def rewritten(self, observations: Tree, agent_id: Any = None, numerics: Numerics = ARRAYS) -> Any:
        space = self._needed_space("observation")
        if not self._concerns(agent_id):
            return observations
        if self.multi_agent:
            space = space_of_agent(space, agent_id)
        return flatten(self._kept(space), observations, numerics[0])

    def _made(self, space: Space, agent_id: Any) -> Space:
        return self._flat_space(space) if self._concerns(agent_id) else space

    def _flat_space(self, space: Space) -> Space:
        return spaces.Box(-np.inf, np.inf, (flat_size(self._kept(space)),), np.float32)

    def _kept(self, space: Space) -> Space:
        check_has_numbers(space, "FlattenObservations can't flatten observations")
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


@dataclass(kw_only=True, eq=False, repr=False)
class PrevActionsPrevRewards(ObservationRewriter):
    """Rewrites every episode's last observation as a dict of itself and the last steps' actions and rewards.

        multi_agent       True where the spaces are Dicts by agent ids
        n_prev_actions    number of actions; with 0 that part is left out
        n_prev_rewards    number of rewards; likewise

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
    pipelines = ("env-to-module", "learner")

    multi_agent: bool = False
    n_prev_actions: int = 1
    n_prev_rewards: int = 1

    def __post_init__(self) -> None:
        self.n_prev_actions = checked_count("n_prev_actions", self.n_prev_actions, 0)
        self.n_prev_rewards = checked_count("n_prev_rewards", self.n_prev_rewards, 0)
        self.lookback = max(self.n_prev_actions, self.n_prev_rewards)

    def recompute_output_observation_space(self, input_observation_space: Space, input_action_space: Space) -> Space:
        if self.multi_agent:
            return space_by_agents(input_observation_space, input_action_space, self._made)
        return self._made(input_observation_space, input_action_space)

    def _made(self, observation_space: Space, action_space: Any, agent_id: Any = None) -> Space:
        parts: dict[str, Space] = {self.ORIG_OBS_KEY: observation_space}
        if self.n_prev_actions and action_space is not None:  # which may be set later
            check_has_numbers(action_space, "PrevActionsPrevRewards can't show actions")
            width = self.n_prev_actions * flat_size(action_space)
            numbered = isinstance(action_space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary)
            low, high = (0.0, 1.0) if numbered else (-np.inf, np.inf)
            parts[self.PREV_ACTIONS_KEY] = spaces.Box(low, high, (width,), np.float32)
        if self.n_prev_rewards:
            parts[self.PREV_REWARDS_KEY] = spaces.Box(-np.inf, np.inf, (self.n_prev_rewards,), np.float32)
        return spaces.Dict(parts)

    def of_lane(self, episodes: LaneEpisodes) -> dict[str, Any]:
        parts: dict[str, Any] = {self.ORIG_OBS_KEY: episodes.newest()}
        if self.n_prev_actions:
            actions = flatten(self._action_space_of(None), episodes.recent(Columns.ACTIONS, self.n_prev_actions))
            there = episodes.steps_there(self.n_prev_actions)
            actions[~there] = 0.0
            parts[self.PREV_ACTIONS_KEY] = actions.reshape(len(actions), -1)
        if self.n_prev_rewards:
            parts[self.PREV_REWARDS_KEY] = episodes.recent(Columns.REWARDS, self.n_prev_rewards)
        return parts

    def of_episode(self, episode: SingleAgentEpisode) -> dict[str, Any]:
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

    def _action_space_of(self, agent_id: Any) -> Space:
        space = self._needed_space("action")
        return space_of_agent(space, agent_id) if self.multi_agent else space


class WriteObservationsToEpisodes(ConnectorV2):
    """Writes the batch's `obs` into the episodes, each item over its episode's last observation.

    Changes that pieces before it made to the batch then last. Of several agents the space is a Dict by agent ids, or
    the same for all. Raises ConnectorError, a ValueError, for a batch without `obs`, or without one item for each
    episode.
    """

    columnar = True
    pipelines = ("env-to-module",)

    def __call__(self, *, batch: Batch, episodes: Episodes, **kwargs: Any) -> Batch:
        if Columns.OBS not in batch:
            raise ConnectorError(
                f"WriteObservationsToEpisodes: the batch has no column '{Columns.OBS}'; columns: "
                f"{', '.join(batch) or 'none'}; does it stand behind AddObservationsFromEpisodesToBatch?"
            )
        observations = batch[Columns.OBS]
        in_items = isinstance(observations, list) or is_keyed_by_episode(observations)
        if isinstance(episodes, LaneEpisodes) and not in_items:
            episodes.set_observations(observations)
            return batch
        if not in_items:
            observations = unstack_tree(observations)
        count = len(observations) if isinstance(observations, list) else sum(map(len, observations.values()))
        expected = len(list(self.single_agent_episode_iterator(episodes)))
        if count != expected:
            raise ConnectorError(
                f"{self.name}: column '{Columns.OBS}' has {count} items, expected {expected}: one for each episode, "
                "or for each agent that has an observation at its env step"
            )
        pairs = list(self.single_agent_episode_iterator(episodes, zip_with_batch_column=observations))
        for episode, observation in pairs:
            rewrite_last(episode, observation, self.observation_space)
        return batch
