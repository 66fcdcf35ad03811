"""Checks of a host's answers against its spaces and against the request."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rollflow.stream.data.errors import WireError
from rollflow.stream.data.infos import SlotInfos
from rollflow.stream.data.packing import pack
from rollflow.stream.data.space import describe_space, leaves_within
from rollflow.stream.data.tree import Tree, leaves_of
from rollflow.stream.episodes.agent_timeline import ALL_AGENTS
from rollflow.stream.wire.codec.field import shown
from rollflow.stream.wire.codec.handshake import MOST_SLOTS, Hello
from rollflow.stream.wire.codec.messages import AgentRows, AgentSlots, Infos, Reset, Rows, Step
from rollflow.stream.wire.codec.spaces import placed, read_space


@dataclass(frozen=True, slots=True)
class RowForm:
    """Form of a host's rows: its spaces, and what its environments do at an episode's end."""

    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    autoreset: str

    @classmethod
    def of(cls, hello: Hello) -> "RowForm":
        """As a Hello says. Raises WireError for spaces that are none, and for agents."""
        if hello.agents is not None or hello.parts is not None:
            told = f"hello.agents is {shown(hello.agents)} and hello.parts {shown(hello.parts)}"
            raise _wrong(told, f"neither with the role '{hello.role}'")
        return cls(
            read_space(hello.observation_space, "hello.observation_space"),
            read_space(hello.action_space, "hello.action_space"),
            hello.autoreset,
        )

    def check_request(self, request: Reset | Step, slots: int) -> Reset | Step:
        """The request of a lane of so many slots, its actions as the space has them. Raises WireError."""
        where = f"{request.kind} {request.number} of lane {request.lane}"
        if isinstance(request, Step):
            if request.agent_slots is not None:
                raise WireError(f"{where}: agent_slots is {shown(request.agent_slots)}, expected none", "request")
            actions = placed(request.actions, self.action_space, slots, f"{where}: actions", "request")
            return replace(request, actions=actions)
        _check_seeds(request, slots, where)
        return request

    def check_rows(self, rows: Rows, request: Reset | Step, slots: int) -> Rows:
        """The answer of a lane of so many slots, its observations as the space has them.

        Raises WireError if arrays don't fit, rewards are not finite, an observation is not a number, or the last
        observations are not those of the episodes that ended.
        """
        where = f"{request.kind} {rows.number} of lane {rows.lane}"
        obs = placed(rows.obs, self.observation_space, slots, f"{where}: obs")
        _check_numbers(self.observation_space, obs, range(slots), f"{where}: obs")
        check_infos(rows.infos, slots, f"{where}: infos")
        check_infos(rows.final_infos, slots, f"{where}: final_infos")
        is_step = isinstance(request, Step)
        _check_columns(rows, [slots], where, is_step=is_step)
        terminateds: Any = rows.terminateds  # None after a reset
        ended = tuple(np.flatnonzero(terminateds | rows.truncateds).tolist()) if is_step else ()
        expected = () if self.autoreset == "NEXT_STEP" else ended
        if rows.final_slots != expected:
            raise WireError(
                f"{where}: final_slots is {shown(list(rows.final_slots))}, expected {shown(list(expected))}: under "
                f"{self.autoreset}, {'no slot' if self.autoreset == 'NEXT_STEP' else 'every slot that ended'}",
                "rows",
            )
        if (rows.final_obs is None) != (not expected):
            raise WireError(
                f"{where}: final_obs is {shown(rows.final_obs)}, expected "
                f"{'the last observations of slots ' + shown(list(expected)) if expected else 'nil'}",
                "rows",
            )
        final_obs = None
        if expected:
            final_obs = placed(rows.final_obs, self.observation_space, len(expected), f"{where}: final_obs")
            _check_numbers(self.observation_space, final_obs, expected, f"{where}: final_obs")
        return replace(rows, obs=obs, final_obs=final_obs)


def _check_seeds(request: Reset, slots: int, where: str) -> None:
    if request.seeds is not None and len(request.seeds) != slots:
        raise WireError(f"{where}: {len(request.seeds)} seeds, expected {slots} or none", "request")


def _check_columns(rows: Rows | AgentRows, counts: list[int], where: str, *, is_step: bool) -> None:
    """Raise WireError if rewards or flags are not there for every slot of a step, or rewards are not finite.

    counts    slots of each part; of one agent there is one part
    """
    for name in ("terminateds", "truncateds", "rewards"):  # all lengths before the numbers of the last
        column = getattr(rows, name)
        parts = [column] if isinstance(column, np.ndarray) else column
        if (parts is not None) != is_step or (is_step and [len(part) for part in parts] != counts):
            given, numbers = "nil" if column is None else shown(column), f"{', '.join(map(str, counts))} numbers"
            expected = "nil" if not is_step else f"arrays of {numbers}" if isinstance(rows, AgentRows) else numbers
            raise WireError(f"{where}: {name} is {given}, expected {expected}", "rows")
        for part, rewards in enumerate(parts if is_step and name == "rewards" else ()):
            if not np.isfinite(rewards).all():
                slot = int(np.argmin(np.isfinite(rewards)))
                whose = f"slot {slot}" if rewards is column else f"agent slot {slot} of part {part}"
                raise WireError(f"{where}: the reward of {whose} is {rewards[slot]}, expected a finite number", "rows")


def _check_numbers(space: gym.Space[Any], items: Tree, slots: Sequence[int], where: str, what: str = "slot") -> None:
    """Raise WireError if an array of floats, one item of a space for each of `slots`, has a NaN.

    what    a slot is called
    """
    if any(numbers.dtype.kind == "f" and np.isnan(numbers).any() for numbers in leaves_of(items)):
        for leaf in leaves_within(space, where):
            wrong = np.isnan(leaf.found(items)).reshape(len(slots), -1).any(axis=1)
            if wrong.any():
                raise WireError(f"{leaf.path} of {what} {slots[wrong.argmax()]} has a NaN, expected numbers", "rows")


def check_infos(infos: Mapping[str, Any], slots: int, where: str) -> None:
    """Raise WireError if vector infos can't be split by slots."""
    if isinstance(infos, SlotInfos):
        if infos.count != slots:
            raise WireError(f"{where} of {infos.count} slots, expected {slots}", "rows")
        return
    for key, value in infos.items():
        if type(key) is not str:
            raise WireError(f"{where} has the key {shown(key)}, expected strings", "rows")
        if key.startswith("_") and key[1:] in infos:
            if not _is_mask(value, slots):
                raise WireError(f"{where}[{key!r}] is {shown(value)}, expected an array |b1[{slots}]", "rows")
        elif isinstance(value, Mapping):
            check_infos(value, slots, f"{where}[{key!r}]")


def _is_mask(value: Any, slots: int) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.bool_ and value.shape == (slots,)


@dataclass(frozen=True, slots=True)
class AgentForm:
    """Form of a host's answers.

    agents                               ids, in order
    sizes                                how many agents each part has
    observation_spaces, action_spaces    of each part
    """

    agents: tuple[str | int, ...]
    sizes: tuple[int, ...]
    observation_spaces: tuple[gym.Space[Any], ...]
    action_spaces: tuple[gym.Space[Any], ...]

    @classmethod
    def of(cls, hello: Hello) -> "AgentForm":
        """As a Hello says. Raises WireError for spaces that are none, and agents that don't go with them."""
        observed, done = (
            _parts_in(read_space(getattr(hello, name), f"hello.{name}"), f"hello.{name}")
            for name in ("observation_space", "action_space")
        )
        agents, sizes = _agents_in(hello, len(observed))
        if len(done) != len(observed):
            raise _wrong(f"hello.action_space of {len(done)} parts", f"{len(observed)}, as hello.observation_space has")
        _check_different(observed, done)
        if hello.autoreset != "SAME_STEP":
            raise _wrong(f"hello.autoreset is {hello.autoreset}", "SAME_STEP for several agents")
        if hello.num_envs * len(agents) > MOST_SLOTS:
            raise _wrong(
                f"hello: {hello.num_envs} environments of {len(agents)} agents", f"at most {MOST_SLOTS} in all"
            )
        return cls(agents, sizes, observed, done)

    def check_request(self, request: Reset | Step, slots: int) -> Reset | Step:
        """The request of a lane of so many environments, its actions as the spaces have them. Raises WireError."""
        where = f"{request.kind} {request.number} of lane {request.lane}"
        if isinstance(request, Reset):
            _check_seeds(request, slots, where)
            if request.options is not None:
                raise WireError(f"{where}: options is {shown(request.options)}, expected nil", "request")
            return request
        chosen, actions = self._items(
            request.agent_slots, request.actions, self.action_spaces, slots, (where, "actions"), code="request"
        )
        return replace(request, agent_slots=chosen, actions=list(actions))

    def check_rows(self, rows: AgentRows, request: Reset | Step, slots: int) -> AgentRows:
        """The answer of a lane of so many environments, its observations as the spaces have them.

        Raises WireError if arrays don't fit, rewards are not finite, or an observation is not a number.
        """
        where, is_step = f"{request.kind} {rows.number} of lane {rows.lane}", isinstance(request, Step)
        seen, obs = self._observed(rows.agent_slots, rows.obs, slots, (where, "obs"))
        _check_columns(rows, [slots * size for size in self.sizes], where, is_step=is_step)
        ended = _envs_ended(rows, is_step, slots, where)
        _check_infos(rows.infos, slots, len(self.agents), f"{where}: infos")
        _check_infos(rows.first_infos, len(ended), len(self.agents), f"{where}: first_infos")
        for name, value in (("first_agent_slots", rows.first_agent_slots), ("first_obs", rows.first_obs)):
            if (value is None) != (not len(ended)):
                expected = "nil, as no episode ended" if not len(ended) else "first observations, as episodes ended"
                raise WireError(f"{where}: {name} is {shown(value)}, expected {expected}", "rows")
        rows = replace(rows, agent_slots=seen, obs=obs)
        if rows.first_agent_slots is None or rows.first_obs is None:
            return rows
        first = self._observed(rows.first_agent_slots, rows.first_obs, slots, (where, "first_obs"))
        return replace(rows, first_agent_slots=first[0], first_obs=first[1])

    # Inside

    def _observed(
        self, agent_slots: AgentSlots, trees: Sequence[Tree], slots: int, where: tuple[str, str]
    ) -> tuple[AgentSlots, tuple[Tree, ...]]:
        """Observations, as `_items` has them. Raises WireError for a NaN."""
        chosen, obs = self._items(agent_slots, trees, self.observation_spaces, slots, where, code="rows")
        for part, (space, each, tree) in enumerate(zip(self.observation_spaces, chosen, obs, strict=True)):
            numbers = range(slots * self.sizes[part]) if each is None else each.tolist()
            _check_numbers(space, tree, numbers, f"{where[0]}: {where[1]}[{part}]", "agent slot")
        return chosen, obs

    def _items(
        self,
        agent_slots: AgentSlots | None,
        trees: Any,
        spaces: Sequence[gym.Space[Any]],
        slots: int,
        where: tuple[str, str],
        *,
        code: str,
    ) -> tuple[AgentSlots, tuple[Tree, ...]]:
        """Agent slots and their items, part by part; None for all slots of a part.

        where    where they are, and what the items are called there
        """
        place, name = where
        slots_field = "first_agent_slots" if name == "first_obs" else "agent_slots"
        for value, field in ((agent_slots, slots_field), (trees, name)):
            if not isinstance(value, list | tuple) or len(value) != len(spaces):
                raise WireError(f"{place}: {field} is {shown(value)}, expected a list of {len(spaces)} parts", code)
        assert agent_slots is not None
        chosen, items = [], []
        for part, (each, tree, space) in enumerate(zip(agent_slots, trees, spaces, strict=True)):
            everybody = slots * self.sizes[part]
            here = f"{place}: {name}[{part}]"
            if each is not None:
                _check_ascending(each, everybody, f"{here}: its agent slots", code)
            count = everybody if each is None else len(each)
            chosen.append(None if count == everybody else each)
            items.append(placed(tree, space, count, here, code))
        return tuple(chosen), tuple(items)


def _parts_in(space: gym.Space[Any], where: str) -> tuple[gym.Space[Any], ...]:
    if not isinstance(space, gym.spaces.Tuple) or not space.spaces:
        raise _wrong(f"{where} is {space}", "a Tuple of the parts' spaces")
    return tuple(space.spaces)


def _check_different(observed: Sequence[gym.Space[Any]], done: Sequence[gym.Space[Any]]) -> None:
    """Raise WireError if two parts have the same spaces."""
    parts: dict[bytes, int] = {}
    for part, spaces in enumerate(zip(observed, done, strict=True)):
        other = parts.setdefault(pack([describe_space(space) for space in spaces]), part)
        if other != part:
            raise _wrong(f"hello: parts {other} and {part} have the same spaces", "one part of all their agents")


def _agents_in(hello: Hello, parts: int) -> tuple[tuple[str | int, ...], tuple[int, ...]]:
    """The agents' ids, and how many each of so many parts has."""
    agents, theirs = hello.agents, hello.parts
    if agents is None or theirs is None or len(agents) != len(theirs):
        raise _wrong(f"hello.agents is {shown(agents)} and hello.parts {shown(theirs)}", "every agent, and its part")
    if len(set(agents)) < len(agents) or ALL_AGENTS in agents:
        raise _wrong(f"hello.agents is {shown(list(agents))}", f"each agent once, and none named '{ALL_AGENTS}'")
    if list(dict.fromkeys(theirs)) != list(range(parts)):
        raise _wrong(f"hello.parts is {shown(list(theirs))}", f"0 to {parts - 1}, numbered as their first agents come")
    counts = Counter(theirs)
    return agents, tuple(counts[part] for part in range(parts))


def _check_ascending(numbers: NDArray[np.int64], most: int, where: str, code: str) -> None:
    """Raise WireError for numbers that are not from 0 to most - 1, each once, in order."""
    if len(numbers) and not (0 <= numbers[0] and numbers[-1] < most and (numbers[1:] > numbers[:-1]).all()):
        raise WireError(f"{where} are {shown(numbers.tolist())}, expected some of 0 to {most - 1}, ascending", code)


def _envs_ended(rows: AgentRows, is_step: bool, slots: int, where: str) -> NDArray[np.int64]:
    """The environments whose episodes ended."""
    ended, truncated = rows.ended, rows.ended_truncated
    if (ended is None) == is_step or (truncated is None) == is_step:
        wanted = "arrays of them" if is_step else "nil"
        raise WireError(
            f"{where}: ended is {shown(ended)} and ended_truncated {shown(truncated)}, expected {wanted}", "rows"
        )
    if ended is None or truncated is None:
        return np.zeros(0, np.int64)
    _check_ascending(ended, slots, f"{where}: ended", "rows")
    if len(truncated) != len(ended):
        raise WireError(f"{where}: ended_truncated is {shown(truncated)}, expected {len(ended)} numbers", "rows")
    return ended


def _check_infos(infos: Infos, count: int, agents: int, where: str) -> None:
    """Raise WireError if infos are not those of so many environments, or of agents that there are."""
    if len(infos) not in (0, count):
        raise WireError(f"{where} of {len(infos)} environments, expected {count}, or none", "rows")
    for each in infos:
        numbers = sorted(number for number, _ in each)
        if numbers and (numbers[0] < 0 or numbers[-1] >= agents or any(a == b for a, b in pairwise(numbers))):
            raise WireError(f"{where} of agents {shown(numbers)}, expected each once, of 0 to {agents - 1}", "rows")


def _wrong(text: str, expected: str) -> WireError:
    return WireError(f"{text}, expected {expected}", "spaces")
