"""Getters of a multi-agent episode: one quantity of several agents, by env steps or by each agent's own steps."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollflow.stream.data.errors import located
from rollflow.stream.episodes.agent_roster import AgentRoster
from rollflow.stream.episodes.agent_timeline import AgentTimeline, ColumnName
from rollflow.stream.episodes.buffer import Indices, LookbackBuffer, count_of

OUTSIDE = -(2**62)
"""Number that stands for an env step outside the chunk; no agent has an observation there."""


@dataclass(frozen=True, slots=True)
class GetterQuery:
    """Arguments of a getter: see `LookbackBuffer.get` for the index rules.

    by_env_steps     whether the indices are env steps, rather than each agent's own steps
    as_list          whether the answer is a list of one dict per env step
    """

    indices: Indices
    neg_index_as_lookback: bool
    fill: Any
    one_hot_discrete: bool
    by_env_steps: bool
    as_list: bool

    @property
    def with_pending(self) -> bool:
        """True if hanging actions count: they don't for an agent's own steps without indices."""
        return self.by_env_steps or self.indices is not None

    def of(self, buffer: LookbackBuffer, indices: Indices, neg_index_as_lookback: bool) -> Any:
        """The items of one agent's buffer at these indices."""
        return buffer.get(
            indices,
            neg_index_as_lookback=neg_index_as_lookback,
            fill=self.fill,
            one_hot_discrete=self.one_hot_discrete,
        )

    def at(self, buffer: LookbackBuffer, positions: Sequence[int]) -> Any:
        """The items at these positions; a position of -1 or behind the end gives a filler, or nothing."""
        total, lookback = buffer.total(), buffer.lookback
        if isinstance(positions, range) and self.fill is None:
            return self.of(buffer, slice(positions.start - lookback, positions.stop - lookback), True)
        indices = [position - lookback if position < total else -1 - lookback for position in positions]
        if self.fill is None:
            indices = [index for index in indices if index >= -lookback]
        return self.of(buffer, indices, True)


class EnvStepBuffer(LookbackBuffer):
    """Buffer of the numbers of a chunk's env steps, which gives them the index rules of all getters.

    first       the oldest env step
    count       number of env steps, with the lookback
    lookback    number of env steps that are history
    name        name of the quantity that is read, for errors
    """

    def __init__(self, first: int, count: int, lookback: int, name: str) -> None:
        super().__init__(None, lookback, name=name)
        self._first, self._count = first, count

    @property
    def is_numpy(self) -> bool:
        return False

    def total(self) -> int:
        return self._count

    def item(self, position: int) -> int:
        return self._first + position

    def items(self, where: Any) -> Sequence[int]:
        steps = range(self._first, self._first + self._count)
        return steps[where] if isinstance(where, slice) else [steps[position] for position in where]


def read_column(roster: AgentRoster, name: ColumnName, agent_ids: Any, query: GetterQuery) -> Any:
    """Observations, infos, actions or rewards of agents: agent id -> items, or a list of such dicts by env step.

    agent_ids    one id, or a list, tuple or set of ids; None: all agents

    Raises EpisodeIndexError for an int or list index outside. Raises ValueError for `as_list` without `by_env_steps`,
    and for one-hot vectors without a space.
    """
    with_pending = query.with_pending
    return _read(roster, name, lambda timeline: timeline.column(name, with_pending=with_pending), agent_ids, query)


def read_output(roster: AgentRoster, key: str, agent_ids: Any, query: GetterQuery) -> Any:
    """One extra model output of agents: see `read_column`."""
    with_pending = query.with_pending
    return _read(roster, key, lambda timeline: timeline.output(key, with_pending=with_pending), agent_ids, query)


def read_outputs(roster: AgentRoster, keys: Sequence[str], agent_ids: Any, query: GetterQuery) -> Any:
    """Several extra model outputs: agent id -> key -> items, or a list of such dicts by env step."""
    if not keys and query.as_list:
        return [{} for _ in read_output(roster, "", agent_ids, query)]
    return _by_agents({key: read_output(roster, key, agent_ids, query) for key in keys})


def _read(
    roster: AgentRoster,
    name: str,
    column_of: Callable[[AgentTimeline], LookbackBuffer],
    agent_ids: Any,
    query: GetterQuery,
) -> Any:
    timelines = roster.timelines
    if agent_ids is not None:
        chosen = agent_ids if isinstance(agent_ids, list | tuple | set | frozenset) else [agent_ids]
        timelines = {agent_id: timeline for agent_id, timeline in timelines.items() if agent_id in chosen}
    if query.by_env_steps:
        first = roster.env_t_started - roster.lookback
        count = roster.env_t - first + (name in ("observations", "infos"))
        return _by_env_steps(timelines, column_of, EnvStepBuffer(first, count, roster.lookback, name), query)
    if query.as_list:
        raise ValueError(f"return_list on '{name}' lists env steps, expected env_steps=True")
    return _by_agent_steps(timelines, column_of, query)


def _by_env_steps(
    timelines: Mapping[Any, AgentTimeline],
    column_of: Callable[[AgentTimeline], LookbackBuffer],
    clock: EnvStepBuffer,
    query: GetterQuery,
) -> Any:
    """Agent id -> its items at the env steps of the query, without its gaps; or a list of such dicts.

    With a fill value every agent has an item for every env step. Raises EpisodeIndexError for an int or list index
    outside.
    """
    outside = None if query.fill is None else OUTSIDE
    steps = clock.get(query.indices, neg_index_as_lookback=query.neg_index_as_lookback, fill=outside)
    if query.as_list:
        steps = [steps] if isinstance(steps, int) else steps
        return [_read_one(timelines, column_of, step, query) for step in steps]
    if isinstance(steps, int):
        return _read_one(timelines, column_of, steps, query)
    answer = {}
    for agent_id, timeline in timelines.items():
        buffer, positions = column_of(timeline), timeline.positions(steps, with_gaps=query.fill is not None)
        if query.fill is not None or any(0 <= position < buffer.total() for position in positions):
            with located(f"agent '{agent_id}'"):
                answer[agent_id] = query.at(buffer, positions)
    return answer


def _by_agent_steps(
    timelines: Mapping[Any, AgentTimeline], column_of: Callable[[AgentTimeline], LookbackBuffer], query: GetterQuery
) -> dict[Any, Any]:
    """Agent id -> its items at the query's indices, which are its own steps; agents without items are absent.

    Raises EpisodeIndexError for an int or list index that any of the agents does not have.
    """
    answer = {}
    for agent_id, timeline in timelines.items():
        buffer = column_of(timeline)
        with located(f"agent '{agent_id}'"):
            items = query.of(buffer, query.indices, query.neg_index_as_lookback)
        is_one = isinstance(query.indices, int | np.integer)
        if is_one or (len(items) if isinstance(items, list) else count_of(items, buffer.name)):
            answer[agent_id] = items
    return answer


def _read_one(
    timelines: Mapping[Any, AgentTimeline],
    column_of: Callable[[AgentTimeline], LookbackBuffer],
    step: int,
    query: GetterQuery,
) -> dict[Any, Any]:
    answer = {}
    for agent_id, timeline in timelines.items():
        buffer, position = column_of(timeline), timeline.position(step)
        if 0 <= position < buffer.total():
            answer[agent_id] = query.of(buffer, position - buffer.lookback, True)
        elif query.fill is not None:
            answer[agent_id] = query.of(buffer, -1 - buffer.lookback, True)
    return answer


def _by_agents(by_key: Mapping[str, Any]) -> Any:
    """Turn key -> agent id -> items, or lists of such dicts by env step, into agent id -> key -> items."""
    lists = [answer for answer in by_key.values() if isinstance(answer, list)]
    if lists:
        return [_by_agents(dict(zip(by_key, at_step, strict=True))) for at_step in zip(*lists, strict=True)]
    answer: dict[Any, dict[str, Any]] = {}
    for key, of_agents in by_key.items():
        for agent_id, items in of_agents.items():
            answer.setdefault(agent_id, {})[key] = items
    return answer
