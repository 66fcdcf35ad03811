"""What a host answers, held against its spaces and against what it was asked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rollflow.stream.errors import WireError
from rollflow.stream.infos import SlotInfos
from rollflow.stream.tree import Tree
from rollflow.stream.wire.field import shown
from rollflow.stream.wire.handshake import Hello
from rollflow.stream.wire.running import Reset, Rows, Step
from rollflow.stream.wire.spaces import placed, read_space


@dataclass(frozen=True, slots=True)
class RowForm:
    """What the rows of a host look like: its spaces, and what its environments do at an episode's end."""

    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    autoreset: str

    @classmethod
    def of(cls, hello: Hello) -> "RowForm":
        """As a Hello says. Raises WireError for spaces that are none."""
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
        if request.seeds is not None and len(request.seeds) != slots:
            raise WireError(f"{where}: {len(request.seeds)} seeds, expected {slots} or none", "request")
        return request

    def check_rows(self, rows: Rows, request: Reset | Step, slots: int) -> Rows:
        """The answer of a lane of so many slots, its observations as the space has them.

        Raises WireError where arrays don't fit, rewards are not finite, an observation is not a number, or the last
        observations are not those of the episodes that ended.
        """
        where = f"{request.kind} {rows.number} of lane {rows.lane}"
        obs = placed(rows.obs, self.observation_space, slots, f"{where}: obs")
        check_numbers(obs, range(slots), f"{where}: obs")
        check_infos(rows.infos, slots, f"{where}: infos")
        check_infos(rows.final_infos, slots, f"{where}: final_infos")
        ended = _ended(rows, isinstance(request, Step), slots, where)
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
            check_numbers(final_obs, expected, f"{where}: final_obs")
        return replace(rows, obs=obs, final_obs=final_obs)


def _ended(rows: Rows, is_step: bool, slots: int, where: str) -> tuple[int, ...]:
    """The slots whose episode ended. Raises WireError where rewards or flags don't fit."""
    columns: dict[str, NDArray[Any] | None] = {
        "rewards": rows.rewards,
        "terminateds": rows.terminateds,
        "truncateds": rows.truncateds,
    }
    for name, column in columns.items():
        if (column is not None) != is_step or (column is not None and len(column) != slots):
            raise WireError(
                f"{where}: {name} is {'nil' if column is None else shown(column)}, expected "
                f"{f'{slots} numbers' if is_step else 'nil'}",
                "rows",
            )
    if rows.rewards is None or rows.terminateds is None or rows.truncateds is None:
        return ()
    if not np.isfinite(rows.rewards).all():
        slot = int(np.argmin(np.isfinite(rows.rewards)))
        raise WireError(f"{where}: the reward of slot {slot} is {rows.rewards[slot]}, expected a finite number", "rows")
    return tuple(np.flatnonzero(rows.terminateds | rows.truncateds).tolist())


def check_numbers(tree: Tree, slots: Sequence[int], where: str, what: str = "slot") -> None:
    """Raise WireError where an array of floats, one item for each of `slots`, has a NaN.

    what    a slot is called
    """
    if isinstance(tree, dict):
        for key, part in tree.items():
            check_numbers(part, slots, f"{where}[{key!r}]", what)
    elif isinstance(tree, tuple):
        for index, part in enumerate(tree):
            check_numbers(part, slots, f"{where}[{index}]", what)
    elif tree.dtype.kind == "f" and np.isnan(tree).any():
        at = int(np.argmax(np.isnan(tree).reshape(len(tree), -1).any(axis=1)))
        raise WireError(f"{where} of {what} {slots[at]} has a NaN, expected numbers", "rows")


def check_infos(infos: Mapping[str, Any], slots: int, where: str) -> None:
    """Raise WireError where infos can't be taken apart slot by slot."""
    if isinstance(infos, SlotInfos):
        if len(infos.dicts) != slots:
            raise WireError(f"{where} of {len(infos.dicts)} slots, expected {slots}", "rows")
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
