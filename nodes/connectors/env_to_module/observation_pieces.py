"""Pieces that rewrite the last observations: as vectors, with the last actions and rewards, or filtered."""

import abc
import copy
import inspect
import math
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from rollflow.nodes.argument_checks import checked_count, checked_number
from rollflow.nodes.connectors.common.batches import as_array, module_by_module
from rollflow.nodes.connectors.common.episode_columns import LAST_OBSERVATIONS
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes, SharedData, Space
from rollflow.nodes.connectors.list_form import (
    check_has_numbers,
    is_keyed_by_episode,
    rewrite_last,
    single_agent_episodes,
    space_by_agents,
    space_of_agent,
)
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ConnectorError, located
from rollflow.stream.data.space import flat_size, flatten, item_of, map_space, one_hot_items, tree_of
from rollflow.stream.data.tree import Tree, leaves_of, library_of, map_tree, stack_trees, unstack_tree
from rollflow.stream.episodes.multi_agent import MultiAgentEpisode
from rollflow.stream.episodes.single_agent import SingleAgentEpisode
from rollflow.stream.fragments.fragment import FragmentEpisodes
from rollflow.stream.fragments.live_episode import LaneEpisodes


class ObservationRewriter(ConnectorV2):
    """Base of pieces that rewrite every episode's last observation.

    A subclass overrides `rewritten`, or `of_lane` and `of_episode` if other columns are needed as well.
    """

    columnar = True

    def rewritten(self, observations: Tree, agent_id: Any = None) -> Tree:
        """One observation, or those of all slots, a tree of arrays or tensors `any[N, ...]`, as they are to be.

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
        _, *others = inspect.signature(self.preprocess).parameters.values()
        # RLlib's older form is `preprocess(observation)` alone. The second parameter may have another name than here.
        needed = (each for each in others if each.default is each.empty or each.name == "episode")
        parameter = next((each for each in needed if each.kind is not each.VAR_POSITIONAL), None)
        self._by_place = parameter is not None and parameter.kind is parameter.POSITIONAL_ONLY
        self._names: list[str] = []
        if parameter is not None and not self._by_place:
            self._names = ["episode" if parameter.kind is parameter.VAR_KEYWORD else parameter.name]

    @abc.abstractmethod
    def preprocess(self, observation: Any, episode: SingleAgentEpisode) -> Any:
        """Return the replacement of `observation`, the last one of `episode`."""

    def of_episode(self, episode: SingleAgentEpisode) -> Any:
        preprocess: Any = self.preprocess
        placed = [episode] if self._by_place else []
        made = preprocess(episode.get_observations(-1), *placed, **dict.fromkeys(self._names, episode))
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

    on_device = True
    pipelines = ("env-to-module", "learner")

    def recompute_output_observation_space(self, input_observation_space: Space, input_action_space: Space) -> Space:
        return map_space(_one_hot_space, input_observation_space)

    def rewritten(self, observations: Tree, agent_id: Any = None) -> Tree:
        return one_hot_items(space_of_agent(self._needed_space("observation"), agent_id), observations)


def _one_hot_space(space: Space) -> Space:
    if isinstance(space, spaces.Discrete):
        return spaces.Box(0.0, 1.0, (int(space.n),), np.float32)
    if isinstance(space, spaces.MultiDiscrete):
        return spaces.Box(0.0, 1.0, (int(space.nvec.sum()),), np.float32)
    return space


@dataclass(kw_only=True, eq=False, repr=False)
class FlattenObservations(ObservationRewriter):
    """Rewrites every episode's last observation as a vector, f32[D]; before a learner, adds `obs`, f32[B, D].

        multi_agent             True if the spaces are Dicts by agent ids
        agent_ids               the agents whose observations are flattened; None: all
        as_learner_connector    True before a learner. With the piece in the env-to-module pipeline the episodes'
                                observations are flat already
        keys_to_remove          keys of a Dict space that are left out

    A Dict's parts come by sorted key, a Tuple's in order; Discrete and MultiDiscrete ones as one-hot vectors.

    Raises ConnectorError for a space that has no numbers in it, and for keys that it does not have.
    """

    on_device = True
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

    def rewritten(self, observations: Tree, agent_id: Any = None) -> Any:
        space = self._needed_space("observation")
        if not self._concerns(agent_id):
            return observations
        if self.multi_agent:
            space = space_of_agent(space, agent_id)
        return flatten(self._kept(space), observations)

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

        multi_agent       True if the spaces are Dicts by agent ids
        n_prev_actions    number of actions; with 0 that part is left out
        n_prev_rewards    number of rewards; likewise

    The parts, oldest step first, zeros if the episode has no such step:

        _orig_obs         the observation as it was
        prev_n_actions    f32[n_prev_actions * D]: each action as a vector, one-hot if it is a whole number
        prev_n_rewards    f32[n_prev_rewards]

    Raises ConnectorError for an action space without numbers, ValueError for counts below 0.
    """

    ORIG_OBS_KEY = "_orig_obs"
    PREV_ACTIONS_KEY = "prev_n_actions"
    PREV_REWARDS_KEY = "prev_n_rewards"

    on_device = True
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
            there = episodes.steps_there(self.n_prev_actions)[..., None]
            shown = library_of(actions).where(there, actions, 0.0)
            parts[self.PREV_ACTIONS_KEY] = shown.reshape(shown.shape[0], -1)
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
            there = min(steps, self.n_prev_rewards)
            rewards = [episode.get_rewards(i) for i in range(-there, 0)]
            parts[self.PREV_REWARDS_KEY] = np.array([0.0] * (self.n_prev_rewards - there) + rewards, np.float32)
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
    on_device = True
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


Floats = NDArray[np.float64]


class RunningStatistics:
    """Statistics over rows of D numbers each, in f64: arrays, or, once rows on a device were pushed, tensors there.

    count    rows counted; i64[] on a device
    mean     f64[D]
    m2       f64[D]  sum of squared distances from the mean
    """

    __slots__ = ("count", "m2", "mean")

    def __init__(self, size: int) -> None:
        self.count: Any = 0
        self.mean: Any = np.zeros(size)
        self.m2: Any = np.zeros(size)

    def push(self, rows: Floats) -> tuple[Floats, Floats]:
        """Count f64[N, D] row by row; return mean and deviation after each row, f64[N, D] both."""
        center = self.mean if self.count else rows[0]
        # Sums around a center close to the mean lose no digits to large offsets.
        return self._add(rows - center, center, self.count + np.arange(1, len(rows) + 1)[:, None], len(rows))

    def push_tensors(self, rows: torch.Tensor, counted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`push` for a tensor, of which no number is read; rows that are not `counted`, bool[N], add nothing."""
        begins = isinstance(self.count, int) and not self.count
        self.bring_to(rows.device)
        numbers = torch.cumsum(counted, 0)
        first = rows.index_select(0, (numbers > 0).to(torch.int8).argmax(keepdim=True))[0]
        center = torch.where(numbers[-1] > 0, first, 0.0) if begins else self.mean
        counts = (self.count + numbers).clamp(min=1)[:, None]
        return self._add(torch.where(counted[:, None], rows - center, 0.0), center, counts, numbers[-1])

    def _add(self, away: Any, center: Any, counts: Any, more: Any) -> tuple[Any, Any]:
        xp = library_of(away)
        sums = xp.cumsum(away, axis=0)
        means = center + sums / counts
        m2s = xp.clip(self.m2 + xp.cumsum(away * away, axis=0) - sums * sums / counts, 0.0, None)
        self.count += more
        self.mean, self.m2 = means[-1], m2s[-1]
        return means, _deviation(m2s, counts)

    def bring_to(self, device: torch.device) -> None:
        """Make the statistics tensors on a device."""
        if library_of(self.mean) is np:
            self.count = torch.full((), self.count, device=device)
            self.mean, self.m2 = (torch.from_numpy(np.array(each)).to(device) for each in (self.mean, self.m2))

    @property
    def deviation(self) -> Any:
        """f64[D]: the sample's standard deviation; 0 before the second row."""
        return _deviation(self.m2, library_of(self.mean).asarray(self.count))

    @classmethod
    def merged(cls, several: Iterable["RunningStatistics"], size: int) -> Self:
        """The statistics of all rows that any of several has counted; their order makes no difference."""
        total = cls(size)
        # Sorted by content, so that the order of arguments does not change even the rounding.
        here = [cls.from_state(each.get_state(), size) for each in several]
        for each in sorted(here, key=lambda each: (each.count, each.mean.tobytes(), each.m2.tobytes())):
            if not each.count:
                continue
            count = total.count + each.count
            delta = each.mean - total.mean
            total.mean = total.mean + delta * (each.count / count)
            total.m2 = total.m2 + each.m2 + delta * delta * (total.count * each.count / count)
            total.count = count
        return total

    def get_state(self) -> dict[str, Any]:
        """Count, mean and m2, copied."""
        return {"count": int(self.count), "mean": as_array(self.mean).copy(), "m2": as_array(self.m2).copy()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], size: int) -> Self:
        """Restore the statistics that `get_state` gave. Raises ValueError for rows of another size."""
        made = cls(size)
        made.count = int(state["count"])
        made.mean, made.m2 = np.array(state["mean"], np.float64), np.array(state["m2"], np.float64)
        if made.mean.shape != (size,) or made.m2.shape != (size,):
            raise ValueError(f"mean of shape {list(made.mean.shape)}, expected [{size}]")
        return made


def _deviation(m2: Any, counts: Any) -> Any:
    xp = library_of(m2)
    return xp.sqrt(m2 / xp.clip(counts - 1, 1, None))


_SMALLEST_DEVIATION = 1e-8


@dataclass(kw_only=True, eq=False, repr=False)
class MeanStdFilter(ConnectorV2):
    """Rewrites every episode's last observation as its distance from the running mean, in running deviations.

        multi_agent        True: a filter for each agent, see `of_agent`. The spaces are Dicts by agent ids then, and
                           the state is agent id -> state of its filter
        de_mean_to_zero    True: subtract the mean
        de_std_to_one      True: divide by the sample's deviation, if that is more than 0
        clip_by_value      clip to -value … value; None: don't
        update_stats       True: count the observations

    Boxes alone change, to f32 of the same shape, also inside a Dict or Tuple. Every observation is counted before it is
    filtered, those of one vector step slot by slot; so the very first becomes 0.

    The state keeps each filter's own counts apart from those of other filters. So the states of any number of copies
    merge, in any order and however often, into statistics that count each observation once. Give every copy the merged
    state and go on: its own counts since that state was made stay. `reset_state` first makes it start from the state
    alone.

    Raises ConnectorError for states of another space or another piece. Raises it for spaces without numbers, or with
    another number of them than has been counted, and for observations that are not finite. Those of a lane on a device
    are not counted, and are refused when the fragment is cut.
    """

    columnar = True
    on_device = True
    pipelines = ("env-to-module",)

    multi_agent: bool = False
    de_mean_to_zero: bool = True
    de_std_to_one: bool = True
    clip_by_value: float | None = 10.0
    update_stats: bool = True

    def __post_init__(self) -> None:
        if self.clip_by_value is not None:
            checked_number("clip_by_value", self.clip_by_value, above=0, most=np.inf, noun="None, or a number")
        self._size = 0
        self._of_agents: dict[Any, MeanStdFilter] = {}
        self._filtered: Tree = None  # True for each leaf of an observation that is a Box's
        self._own = RunningStatistics(0)
        self._others: dict[str, RunningStatistics] = {}
        self._forget()

    def recompute_output_observation_space(self, input_observation_space: Space, input_action_space: Space) -> Space:
        if self.multi_agent:
            return space_by_agents(input_observation_space, None, self._space_of_agent)
        check_has_numbers(input_observation_space, "MeanStdFilter can't filter observations")
        self._filtered = tree_of(lambda part: isinstance(part, spaces.Box), input_observation_space)
        leaves = zip(leaves_of(item_of(input_observation_space)), leaves_of(self._filtered), strict=True)
        size = sum(np.size(leaf) for leaf, filtered in leaves if filtered)
        if size != self._size:
            if self.count:
                raise ConnectorError(
                    f"{self.name} has counted {self.count} observations of {self._size} numbers, but those in "
                    f"{input_observation_space} have {size}; expected as many, or reset_state() first"
                )
            self._size = size
            self._forget()
        return map_space(self._output_space, input_observation_space)

    def __call__(self, *, batch: Batch, episodes: Episodes, **kwargs: Any) -> Batch:
        self._know_spaces()
        if self._of_agents:
            self._filter_by_agents(episodes)
            return batch
        self._needed_space("observation")
        if isinstance(episodes, LaneEpisodes):
            episodes.set_observations(self._filter(episodes.newest(), episodes.counted))
            return batch
        alone = list(self.single_agent_episode_iterator(episodes))
        if not alone:
            return batch
        filtered = self._filter(stack_trees([episode.get_observations(-1) for episode in alone]))
        for episode, item in zip(alone, unstack_tree(filtered), strict=True):
            rewrite_last(episode, item, self.observation_space)
        return batch

    # Statistics

    @property
    def count(self) -> int:
        """Observations counted, here and by those whose states were merged in; of all agents."""
        return int(self._total.count) + sum(each.count for each in self._of_agents.values())

    @property
    def mean(self) -> NDArray[np.float64]:
        """f64[D]: of all numbers in Boxes, in the order of an observation's leaves; not for several agents."""
        self._refuse_several("mean")
        return as_array(self._total.mean)  # type: ignore[no-any-return]

    @property
    def deviation(self) -> NDArray[np.float64]:
        """f64[D]: the sample's standard deviation, in the same order; not for several agents."""
        self._refuse_several("deviation")
        return as_array(self._total.deviation)  # type: ignore[no-any-return]

    def of_agent(self, agent_id: Any) -> "MeanStdFilter":
        """An agent's own filter. Raises ConnectorError for an agent that the observation space has no part for."""
        self._know_spaces()
        if agent_id not in self._of_agents:
            raise ConnectorError(
                f"{self.name} has no filter for agent '{agent_id}': the observation space is by agents "
                f"{', '.join(map(str, self._of_agents)) or 'none'}"
            )
        return self._of_agents[agent_id]

    def get_state(self, components: Any = None, *, not_components: Any = None, **kwargs: Any) -> dict[str, Any]:
        """The counts of every known filter, by the filter's id; merge several states with `merge_states`."""
        if self.multi_agent:
            states = {agent_id: each.get_state() for agent_id, each in self._of_agents.items()}
            return {agent_id: state for agent_id, state in states.items() if state}
        sources = {**self._others, self._id: self._own}
        states = {source: each.get_state() for source, each in sources.items() if each.count}
        return {"space": self._space_text(), "sources": states} if states else {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Take over the counts of all filters of a state."""
        self._check_state(state)
        if self.multi_agent:
            for agent_id, filter_, theirs in [(each, self.of_agent(each), state[each]) for each in state]:
                with located(f"agent '{agent_id}'"):
                    filter_.set_state(theirs)
        if not state or self.multi_agent:
            return
        sources = self._sources_of(state)
        own = sources.pop(self._id, None)
        if own is not None and own.count > self._own.count:
            self._own = own
        self._others = sources
        self._add_up()

    def reset_state(self) -> None:
        """Forget all statistics, and count as another filter from now on."""
        self._forget()
        for each in self._of_agents.values():
            each.reset_state()

    def count_as(self, name: str) -> None:
        """Count as the filter of this name from now on, and go on from its counts, if they are among the others'."""
        state = self.get_state()
        self._id, self._own = name, RunningStatistics(self._size)
        if state and not self.multi_agent:
            self.set_state(state)
        for each in self._of_agents.values():
            each.count_as(name)

    def merge_states(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """The counts of this filter and of all others, each from the state that has most of it."""
        if self.multi_agent:
            agents = self._of_agents | {agent_id: self.of_agent(agent_id) for state in states for agent_id in state}
            of_agents = {
                agent_id: each.merge_states([state[agent_id] for state in states if agent_id in state])
                for agent_id, each in agents.items()
            }
            return {agent_id: state for agent_id, state in of_agents.items() if state}
        merged: dict[str, RunningStatistics] = {}
        for state in [self.get_state(), *states]:
            self._check_state(state)
            for source, each in self._sources_of(state).items() if state else ():
                if source not in merged or each.count > merged[source].count:
                    merged[source] = each
        if not merged:
            return {}
        ordered = {source: merged[source].get_state() for source in sorted(merged)}
        return {"space": self._space_text(), "sources": ordered}

    def __getstate__(self) -> dict[str, Any]:
        """State for copies: a copy counts as another filter, so that both may go on and be merged."""
        state = self.__dict__.copy()
        state["_others"] = {**self._others, self._id: RunningStatistics.from_state(self._own.get_state(), self._size)}
        state["_own"], state["_id"] = RunningStatistics(self._size), uuid.uuid4().hex
        state["_of_agents"] = {agent_id: copy.copy(each) for agent_id, each in self._of_agents.items()}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._add_up()

    # Inside

    def _space_of_agent(self, space: Space, _: Any, agent_id: Any) -> Space:
        made = self._of_agents.setdefault(agent_id, MeanStdFilter())
        made.clip_by_value = self.clip_by_value
        with located(f"agent '{agent_id}'"):
            made.set_input_spaces(space, None)
        assert made.observation_space is not None
        return made.observation_space

    def _filter_by_agents(self, episodes: Episodes) -> None:
        """Each agent's own filter over its observations, episode by episode."""
        by_agent: dict[Any, list[SingleAgentEpisode]] = {}
        for episode in self.single_agent_episode_iterator(episodes):
            by_agent.setdefault(episode.agent_id, []).append(episode)
        for agent_id, theirs in by_agent.items():
            filter_ = self.of_agent(agent_id)
            for option in ("de_mean_to_zero", "de_std_to_one", "clip_by_value", "update_stats"):
                setattr(filter_, option, getattr(self, option))
            with located(f"agent '{agent_id}'"):
                filter_(rl_module=None, batch={}, episodes=theirs)

    def _refuse_several(self, what: str) -> None:
        if self.multi_agent:
            raise ConnectorError(f"{self.name} has a filter for each agent, expected of_agent(agent id).{what}")

    def _filter(self, observations: Tree, counted: Any = None) -> Tree:
        """Filter a tree of arrays, or of tensors, `any[N, ...]`.

        counted    bool[N], the tensors' rows that are counted; None: all
        """

        leaves, flags = leaves_of(observations), leaves_of(self._filtered)
        if len(leaves) != len(flags):
            raise ConnectorError(
                f"{self.name}: observations have {len(leaves)} parts, expected {len(flags)} as {self._space_text()} has"
            )
        kept = [leaf for leaf, filtered in zip(leaves, flags, strict=True) if filtered]
        if not kept:
            return observations
        xp = library_of(kept[0])
        kept = [xp.asarray(part) for part in kept]
        wide = [xp.asarray(part.reshape(part.shape[0], math.prod(part.shape[1:])), dtype=xp.float64) for part in kept]
        rows = wide[0] if len(wide) == 1 else xp.concatenate(wide, 1)
        if rows.shape[1] != self._size:
            raise ConnectorError(
                f"{self.name}: observations of {rows.shape[1]} numbers, expected {self._size}, as "
                f"{self._space_text()} has"
            )
        if xp is np:
            self._check(rows)
            made = self._scaled(rows, *self._pushed(rows, RunningStatistics.push)).astype(np.float32)
        else:
            finite = rows.isfinite().all(1)
            push = partial(RunningStatistics.push_tensors, counted=finite if counted is None else finite & counted)
            if not self.update_stats:
                self._total.bring_to(rows.device)
            made = self._scaled(rows, *self._pushed(rows, push)).float()
            made = made.masked_fill(~rows.isfinite(), torch.nan)  # found when the fragment is cut
        parts = _parts_like(kept, made)
        return map_tree(lambda leaf, filtered: next(parts) if filtered else leaf, observations, self._filtered)

    def _scaled(self, rows: Any, mean: Any, deviation: Any) -> Any:
        """Rows f64[N, D] as their distance from the mean, in deviations."""
        xp = library_of(rows)
        if self.de_mean_to_zero:
            rows = rows - mean
        if self.de_std_to_one:
            rows = rows / xp.where(deviation > 0.0, xp.clip(deviation, _SMALLEST_DEVIATION, None), 1.0)
        return rows if self.clip_by_value is None else xp.clip(rows, -self.clip_by_value, self.clip_by_value)

    def _check(self, rows: NDArray[np.float64]) -> None:
        finite = np.isfinite(rows)
        if not finite.all():
            slot, place = np.argwhere(~finite)[0]
            raise ConnectorError(
                f"{self.name}: number {place} of the observation of slot {slot} is {rows[slot, place]}, expected a "
                "finite one: the mean over it and all others would be lost"
            )

    def _pushed(self, rows: Any, push: Callable[[RunningStatistics, Any], tuple[Any, Any]]) -> tuple[Any, Any]:
        if not self.update_stats:
            return self._total.mean, self._total.deviation
        if self._total is not self._own:
            push(self._own, rows)
        return push(self._total, rows)

    def _forget(self) -> None:
        self._id = uuid.uuid4().hex
        self._own = RunningStatistics(self._size)
        self._others = {}
        self._add_up()

    def _add_up(self) -> None:
        self._total = self._own
        if self._others:
            self._total = RunningStatistics.merged([self._own, *self._others.values()], self._size)

    def _sources_of(self, state: Mapping[str, Any]) -> dict[str, RunningStatistics]:
        if not {"space", "sources"} <= state.keys():
            raise ConnectorError(
                f"{self.name}: a state with {sorted(map(str, state))}, expected 'space' and 'sources': is it another "
                "piece's?"
            )
        if self.input_observation_space is None:
            raise ConnectorError(
                f"{self.name} is given a state, but has no input observation space yet to hold it against"
            )
        if state["space"] != self._space_text():
            raise ConnectorError(
                f"{self.name}: a state of a filter for observations in {state['space']}, expected {self._space_text()}"
            )
        try:
            return {source: RunningStatistics.from_state(each, self._size) for source, each in state["sources"].items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConnectorError(f"{self.name}: a state's 'sources' are no statistics of its: {error!r}") from None

    def _space_text(self) -> str:
        self._know_spaces()
        return str(self.input_observation_space)

    def _output_space(self, space: Space) -> Space:
        if not isinstance(space, spaces.Box):
            return space
        bound = np.inf if self.clip_by_value is None else self.clip_by_value
        return spaces.Box(-bound, bound, space.shape, np.float32)


def _parts_like(leaves: list[Any], rows: Any) -> Iterator[Any]:
    """Rows `f32[N, D]`, cut into the shapes of the leaves that they were joined from."""
    begin = 0
    for leaf in leaves:
        size = math.prod(leaf.shape[1:])
        yield rows[:, begin : begin + size].reshape(leaf.shape)
        begin += size
