"""How one quantity of several agents is read: by env steps, which they share, or by each agent's own steps."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollflow.stream.agent_roster import AgentRoster
from rollflow.stream.agent_timeline import AgentTimeline, ColumnName
from rollflow.stream.buffer import Indices, LookbackBuffer, count_of
from rollflow.stream.errors import located

OUTSIDE = -(2**62)
"""Stands for an env step that a chunk does not have; no agent has an observation there."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a getter was asked for: see `LookbackBuffer.get` for the rules.

    by_env_steps     whether the indices are env steps, or each agent's own
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
        """Whether hanging actions count; an agent's own steps without indices are the whole ones."""
        return self.by_env_steps or self.indices is not None

    def of(self, buffer: LookbackBuffer, indices: Indices, neg_index_as_lookback: bool) -> Any:
        """Items of one agent's buffer."""
        return buffer.get(
            indices,
            neg_index_as_lookback=neg_index_as_lookback,
            fill=self.fill,
            one_hot_discrete=self.one_hot_discrete,
        )

    def at(self, buffer: LookbackBuffer, positions: Sequence[int]) -> Any:
        """Items by position, fillers or nothing where the position is -1 or behind the end."""
        total, lookback = buffer.total(), buffer.lookback
        if isinstance(positions, range) and self.fill is None:
            return self.of(buffer, slice(positions.start - lookback, positions.stop - lookback), True)
        indices = [position - lookback if position < total else -1 - lookback for position in positions]
        if self.fill is None:
            indices = [index for index in indices if index >= -lookback]
        return self.of(buffer, indices, True)


class EnvClock(LookbackBuffer):
    """The env steps of a chunk under the index rules of all getters: its items are their numbers.

    first       the oldest env step that is there
    count       how many there are, the lookback included
    lookback    how many of them are history
    name        of the quantity that is asked for, for messages
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


def read_column(roster: AgentRoster, name: ColumnName, agent_ids: Any, reading: Reading) -> Any:
    """What agents have of observations, infos, actions or rewards: agent id -> items, or a list of dicts by env step.

    agent_ids    one id, or a list, tuple or set of ids; None: all agents

    Raises EpisodeIndexError for an int or list index outside, ValueError for a list of anything but env steps and for
    vectors of what has no space.
    """
    with_pending = reading.with_pending
    return _read(roster, name, lambda timeline: timeline.column(name, with_pending=with_pending), agent_ids, reading)


def read_output(roster: AgentRoster, key: str, agent_ids: Any, reading: Reading) -> Any:
    """One of the modules' other outputs, as `read_column` has the rest."""
    with_pending = reading.with_pending
    return _read(roster, key, lambda timeline: timeline.output(key, with_pending=with_pending), agent_ids, reading)


def read_outputs(roster: AgentRoster, keys: Sequence[str], agent_ids: Any, reading: Reading) -> Any:
    """Several of them: agent id -> key -> items, or a list of such dicts by env step."""
    if not keys and reading.as_list:
        return [{} for _ in read_output(roster, "", agent_ids, reading)]
    return _by_agents({key: read_output(roster, key, agent_ids, reading) for key in keys})


def _read(
    roster: AgentRoster,
    name: str,
    column_of: Callable[[AgentTimeline], LookbackBuffer],
    agent_ids: Any,
    reading: Reading,
) -> Any:
    timelines = roster.timelines
    if agent_ids is not None:
        chosen = agent_ids if isinstance(agent_ids, list | tuple | set | frozenset) else [agent_ids]
        timelines = {agent_id: timeline for agent_id, timeline in timelines.items() if agent_id in chosen}
    if reading.by_env_steps:
        first = roster.env_t_started - roster.lookback
        count = roster.env_t - first + (name in ("observations", "infos"))
        return _by_env_steps(timelines, column_of, EnvClock(first, count, roster.lookback, name), reading)
    if reading.as_list:
        raise ValueError(f"return_list on '{name}' lists env steps, expected env_steps=True")
    return _by_agent_steps(timelines, column_of, reading)


def _by_env_steps(
    timelines: Mapping[Any, AgentTimeline],
    column_of: Callable[[AgentTimeline], LookbackBuffer],
    clock: EnvClock,
    reading: Reading,
) -> Any:
    """Agent id -> its items at the env steps asked for, without those at which it had a gap; or a list of such dicts.

    With a fill value every agent is there, and has an item for every env step. Raises EpisodeIndexError for an int or
    a list index outside.
    """
    outside = None if reading.fill is None else OUTSIDE
    steps = clock.get(reading.indices, neg_index_as_lookback=reading.neg_index_as_lookback, fill=outside)
    if reading.as_list:
        asked = [steps] if isinstance(steps, int) else steps
        return [_read_one(timelines, column_of, step, reading) for step in asked]
    if isinstance(steps, int):
        return _read_one(timelines, column_of, steps, reading)
    answer = {}
    for agent_id, timeline in timelines.items():
        buffer, positions = column_of(timeline), timeline.positions(steps, with_gaps=reading.fill is not None)
        if reading.fill is not None or any(0 <= position < buffer.total() for position in positions):
            with located(f"agent '{agent_id}'"):
                answer[agent_id] = reading.at(buffer, positions)
    return answer


def _by_agent_steps(
    timelines: Mapping[Any, AgentTimeline], column_of: Callable[[AgentTimeline], LookbackBuffer], reading: Reading
) -> dict[Any, Any]:
    """Agent id -> its items at the indices, which are its own steps; agents left with nothing are absent.

    Raises EpisodeIndexError for an int or a list index that any of the agents does not have.
    """
    answer = {}
    for agent_id, timeline in timelines.items():
        buffer = column_of(timeline)
        with located(f"agent '{agent_id}'"):
            items = reading.of(buffer, reading.indices, reading.neg_index_as_lookback)
        is_one = isinstance(reading.indices, int | np.integer)
        if is_one or (len(items) if isinstance(items, list) else count_of(items, buffer.name)):
            answer[agent_id] = items
    return answer


def _read_one(
    timelines: Mapping[Any, AgentTimeline],
    column_of: Callable[[AgentTimeline], LookbackBuffer],
    step: int,
    reading: Reading,
) -> dict[Any, Any]:
    answer = {}
    for agent_id, timeline in timelines.items():
        buffer, position = column_of(timeline), timeline.position(step)
        if 0 <= position < buffer.total():
            answer[agent_id] = reading.of(buffer, position - buffer.lookback, True)
        elif reading.fill is not None:
            answer[agent_id] = reading.of(buffer, -1 - buffer.lookback, True)
    return answer


def _by_agents(by_key: Mapping[str, Any]) -> Any:
    """Key -> agent id -> items, or lists of such dicts by env step, turned into agent id -> key -> items."""
    lists = [answer for answer in by_key.values() if isinstance(answer, list)]
    if lists:
        return [_by_agents(dict(zip(by_key, at_step, strict=True))) for at_step in zip(*lists, strict=True)]
    answer: dict[Any, dict[str, Any]] = {}
    for key, of_agents in by_key.items():
        for agent_id, items in of_agents.items():
            answer.setdefault(agent_id, {})[key] = items
    return answer
