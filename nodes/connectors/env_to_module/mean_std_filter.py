"""Shifts and scales observations by the mean and deviation of all observations so far."""

import copy
import math
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rollflow.nodes.argument_checks import checked_number
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes, Space
from rollflow.nodes.connectors.list_form import rewrite_last
from rollflow.nodes.connectors.spaces import check_has_numbers, space_by_agents
from rollflow.stream.data.errors import ConnectorError, located
from rollflow.stream.data.space import item_of, map_space, tree_of
from rollflow.stream.data.tree import Tree, leaves_of, map_tree, stack_trees, unstack_tree
from rollflow.stream.episodes.single_agent import SingleAgentEpisode
from rollflow.stream.fragments.live_episode import LaneEpisodes

Floats = NDArray[np.float64]


class RunningStatistics:
    """Statistics over rows of D numbers each, in f64.

    count    rows counted
    mean     f64[D]
    m2       f64[D]  sum of squared distances from the mean
    """

    __slots__ = ("count", "m2", "mean")

    def __init__(self, size: int) -> None:
        self.count = 0
        self.mean: Floats = np.zeros(size)
        self.m2: Floats = np.zeros(size)

    def push(self, rows: Floats) -> tuple[Floats, Floats]:
        """Count f64[N, D] row by row; return mean and deviation after each row, f64[N, D] both."""
        center = self.mean if self.count else rows[0]
        # Sums around a center close to the mean lose no digits to large offsets.
        away = rows - center
        counts = self.count + np.arange(1, len(rows) + 1)[:, None]
        sums = np.cumsum(away, axis=0)
        means = center + sums / counts
        m2s = np.maximum(self.m2 + np.cumsum(away * away, axis=0) - sums * sums / counts, 0.0)
        self.count += len(rows)
        self.mean, self.m2 = means[-1], m2s[-1]
        return means, _deviation(m2s, counts)

    @property
    def deviation(self) -> Floats:
        """f64[D]: the sample's standard deviation; 0 before the second row."""
        return _deviation(self.m2, np.array(self.count))

    @classmethod
    def merged(cls, several: Iterable["RunningStatistics"], size: int) -> Self:
        """The statistics of all rows that any of several has counted; their order makes no difference."""
        total = cls(size)
        # Sorted by content, so that the order of arguments does not change even the rounding.
        for each in sorted(several, key=lambda each: (each.count, each.mean.tobytes(), each.m2.tobytes())):
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
        return {"count": self.count, "mean": self.mean.copy(), "m2": self.m2.copy()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], size: int) -> Self:
        """Restore the statistics that `get_state` gave. Raises ValueError for rows of another size."""
        made = cls(size)
        made.count = int(state["count"])
        made.mean, made.m2 = np.array(state["mean"], np.float64), np.array(state["m2"], np.float64)
        if made.mean.shape != (size,) or made.m2.shape != (size,):
            raise ValueError(f"mean of shape {list(made.mean.shape)}, expected [{size}]")
        return made


def _deviation(m2: Floats, counts: NDArray[Any]) -> Floats:
    deviation: Floats = np.sqrt(m2 / np.maximum(counts - 1, 1))
    return deviation


_SMALLEST_DEVIATION = 1e-8


@dataclass(kw_only=True, eq=False, repr=False)
class MeanStdFilter(ConnectorV2):
    """Rewrites every episode's last observation as its distance from the running mean, in running deviations.

        multi_agent        True: a filter for each agent, see `of_agent`. The spaces are Dicts by agent ids then, and
                           the state is agent id -> state of its filter
        de_mean_to_zero    True: subtract the mean
        de_std_to_one      True: divide by the sample's deviation, where that is more than 0
        clip_by_value      clip to -value … value; None: don't
        update_stats       True: count the observations

    Boxes alone change, to f32 of the same shape, also inside a Dict or Tuple. Every observation is counted before it is
    filtered, those of one vector step slot by slot; so the very first becomes 0.

    The state keeps each filter's own counts apart from those of other filters. So the states of any number of copies
    merge, in any order and however often, into statistics that count each observation once. Give every copy the merged
    state and go on: its own counts since that state was made stay. `reset_state` first makes it start from the state
    alone.

    Raises ConnectorError for states of another space or another piece. Raises it for spaces without numbers, or with
    another number of them than has been counted, and for observations that are not finite.
    """

    columnar = True
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
            episodes.set_observations(self._filter(episodes.newest()))
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
        return self._total.count + sum(each.count for each in self._of_agents.values())

    @property
    def mean(self) -> NDArray[np.float64]:
        """f64[D]: of all numbers in Boxes, in the order of an observation's leaves; not for several agents."""
        self._refuse_several("mean")
        return self._total.mean

    @property
    def deviation(self) -> NDArray[np.float64]:
        """f64[D]: the sample's standard deviation, in the same order; not for several agents."""
        self._refuse_several("deviation")
        return self._total.deviation

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

    def _filter(self, observations: Tree) -> Tree:
        """Filter a tree of arrays `any[N, ...]`."""

        def filtered(parts: list[Any]) -> Iterator[NDArray[Any]]:
            kept = [np.asarray(part) for part in parts]
            rows = np.concatenate(
                [part.reshape(len(part), math.prod(part.shape[1:])) for part in kept], axis=1, dtype=np.float64
            )
            self._check(rows)
            return parts_like(kept, self.scaled(rows, *self._pushed(rows), np).astype(np.float32))

        return self.map_boxes(filtered, observations)

    def map_boxes(self, change: Callable[[list[Any]], Iterator[Any]], observations: Tree) -> Tree:
        """Observations, a tree of arrays or tensors `any[N, ...]`, with all the parts that are Boxes changed."""
        leaves, flags = leaves_of(observations), leaves_of(self._filtered)
        if len(leaves) != len(flags):
            raise ConnectorError(
                f"{self.name}: observations have {len(leaves)} parts, expected {len(flags)} as {self._space_text()} has"
            )
        kept = [leaf for leaf, filtered in zip(leaves, flags, strict=True) if filtered]
        if not kept:
            return observations
        parts = change(kept)
        return map_tree(lambda leaf, filtered: next(parts) if filtered else leaf, observations, self._filtered)

    def scaled(self, rows: Any, mean: Any, deviation: Any, xp: Any) -> Any:
        """Rows f64[N, D] as their distance from the mean, in deviations.

        xp    numpy or torch, whichever the arguments are of
        """
        if self.de_mean_to_zero:
            rows = rows - mean
        if self.de_std_to_one:
            rows = rows / xp.where(deviation > 0.0, xp.maximum(deviation, xp.asarray(_SMALLEST_DEVIATION)), 1.0)
        return rows if self.clip_by_value is None else xp.clip(rows, -self.clip_by_value, self.clip_by_value)

    def _check(self, rows: NDArray[np.float64]) -> None:
        if rows.shape[1] != self._size:
            raise ConnectorError(
                f"{self.name}: observations of {rows.shape[1]} numbers, expected {self._size}, as "
                f"{self._space_text()} has"
            )
        finite = np.isfinite(rows)
        if not finite.all():
            slot, place = np.argwhere(~finite)[0]
            raise ConnectorError(
                f"{self.name}: number {place} of the observation of slot {slot} is {rows[slot, place]}, expected a "
                "finite one: the mean over it and all others would be lost"
            )

    def _pushed(self, rows: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        if not self.update_stats:
            return self._total.mean, self._total.deviation
        if self._total is not self._own:
            self._own.push(rows)
        return self._total.push(rows)

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


def parts_like(leaves: list[Any], rows: Any) -> Iterator[Any]:
    """Rows `f32[N, D]`, cut into the shapes of the leaves that they were joined from."""
    begin = 0
    for leaf in leaves:
        size = math.prod(leaf.shape[1:])
        yield rows[:, begin : begin + size].reshape(leaf.shape)
        begin += size
