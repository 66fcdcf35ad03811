"""Checks of what environments give: of a few steps, and with one warning of each kind in a run.

Observations are held against their space; flags are to be bools, and infos dicts, as gymnasium's own checker has it.
What can be recorded is recorded as it is.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from numbers import Real
from typing import Any

import gymnasium as gym
import numpy as np
import optree
from gymnasium.vector import SyncVectorEnv, VectorEnv
from numpy.typing import NDArray

from rollflow.stream.data.column import Column
from rollflow.stream.data.errors import ColumnError, EnvError, shown
from rollflow.stream.data.packing import pack, sendable
from rollflow.stream.data.ranges import check_range
from rollflow.stream.data.space import Leaf, is_columnar, item_of, row_of, tree_of
from rollflow.stream.data.tree import Tree, leaves_of, structure_of
from rollflow.stream.multi_agent.agent_part import AgentPart

logger = logging.getLogger(__name__)

STEP_GIVES = ("observation", "reward", "terminated", "truncated", "info")

# The vector steps, counted from 0, whose observations are checked: the first ones, and ever fewer of the later ones.
CHECKED_STEPS = frozenset(2**power - 1 for power in range(63))
_OF_OBSERVATIONS = ("dtype", "bounds")
KINDS = (*_OF_OBSERVATIONS, "flag", "info", "sent")  # of deviations
_MOST_LETTERS = 1000  # of a text that goes to another process


class Deviations:
    """Deviations of what environments give: the first of each kind in a run is logged as a warning.

    is_logged    False: they are kept instead, for another process that logs them
    """

    def __init__(self, *, is_logged: bool = True) -> None:
        self.unsent: list[tuple[str, str]] = []  # (kind, text), where nothing is logged
        self._kinds: set[str] = set()
        self._is_logged = is_logged

    def has(self, kind: str) -> bool:
        """True if there has been one of this kind."""
        return kind in self._kinds

    def add(self, kind: str, text: str) -> None:
        """Take one, unless there has been one of its kind."""
        if kind in self._kinds:
            return
        self._kinds.add(kind)
        if self._is_logged:
            logger.warning("%s (said once per run)", text)
        else:
            self.unsent.append((kind, text[:_MOST_LETTERS]))

    def left_out(self, text: str) -> None:
        """Take note of an entry of infos that can't be handed to the process that logs."""
        self.add("sent", f"{text}, can't be handed to another process: such entries are left out")

    def packed(self, fields: dict[str, Any], name: str = "value", sent: Callable[[], dict[str, Any]] = dict) -> bytes:
        """Fields with infos, as `pack` packs them, and the kept deviations; b"" if there are none of either.

        sent    gives fields to be sent in place of those of the same names, if those can't be packed

        Entries of infos that can't be packed are left out. Raises ColumnError for anything else that can't be.
        """
        try:
            fields = self._added_to(fields)
            return pack(fields, name) if fields else b""
        except ColumnError:
            return pack(self._added_to(sendable(fields | sent(), self.left_out)), name)

    def _added_to(self, fields: dict[str, Any]) -> dict[str, Any]:
        if not self.unsent:
            return fields
        return fields | {"deviations": [*fields.get("deviations", ()), *map(list, self.take())]}

    def take(self) -> list[tuple[str, str]]:
        """Return the kept ones, and keep them no longer."""
        unsent, self.unsent = self.unsent, []
        return unsent


class ObservationCheck:
    """The check of observations of one space.

    Observations of another structure or shape are passed over: they are refused if they are written.

    space         of one observation
    deviations    collects what is found
    where         of a lane's slots, the lane, at the beginning of every text
    """

    def __init__(self, space: gym.Space[Any], deviations: Deviations, where: str = "") -> None:
        self._deviations, self._where = deviations, where
        tree: Any = tree_of(lambda part: part, space) if is_columnar(space) else ()
        self._structure = structure_of(tree)
        paths = [accessor.codify("") if len(accessor) else "" for accessor in self._structure.accessors()]
        parts: list[Any] = self._structure.flatten_up_to(tree)
        # The path is that within the observation, such as ['camera'][0].
        self._leaves = [Leaf(path, (), part) for path, part in zip(paths, parts, strict=True)]

    def slots(self, observations: Tree, step: int | None = None, slots: Any = (), *, dtypes: bool = True) -> None:
        """Check the first observations of a lane, or those of a vector step, counted from 0: a tree any[N, ...].

        slots     i64[N]: whose observations they are; left out: everyone's
        dtypes    as for `rows`
        """
        when = "the first reset" if step is None else f"vector step {step}"

        def whose(place: int) -> str:
            return f"{self._where}slot {slots[place] if len(slots) else place}, {when}"

        self.rows(observations, whose, dtypes=dtypes)

    def answer(self, slot: int, answer: tuple[Any, ...], name: str) -> None:
        """Check what one slot's `step` or `reset` gave, and name which of them it was.

        Raises EnvError for an info that can't be recorded.
        """
        where = f"{self._where}slot {slot}, {name}"
        self.items(answer[:1], lambda _: where)
        for flag, value in zip(("terminated", "truncated"), answer[2:4], strict=False):
            if np.asarray(value).dtype.kind != "b":
                text = f"{where}: {flag} is {shown(value)}, expected a bool: it is recorded as {bool(value)}"
                self._deviations.add("flag", text)
        if len(answer) in (2, 5) and answer[-1] is None:
            self._deviations.add("info", f"{where}: info is None, expected a dict: it is recorded as an empty one")
        elif len(answer) in (2, 5):
            info_given(answer[-1], where)

    def items(self, observations: Sequence[Tree], whose: Callable[[int], str]) -> None:
        """Check observations one by one: trees of arrays any[...]. `whose` names the one at a place."""
        for place, observation in enumerate(observations):
            self.rows(observation, lambda _, place=place: whose(place), is_one=True)  # type: ignore[misc]

    def rows(self, tree: Tree, whose: Callable[[int], str], *, dtypes: bool = True, is_one: bool = False) -> None:
        """Check observations, a tree of arrays any[K, ...], or one, of any[...]. `whose` names the one at a place.

        dtypes    True if the arrays have the dtypes that the environments gave
        """
        if all(map(self._deviations.has, _OF_OBSERVATIONS)):
            return
        try:
            leaves = self._structure.flatten_up_to(tree)
        except ValueError:  # another structure
            return
        for part, leaf in zip(self._leaves, leaves, strict=True):
            try:
                value = np.asarray(leaf)
            except (TypeError, ValueError, RuntimeError):  # lists of different lengths, tensors of some devices
                continue
            if dtypes and (is_one or len(value)) and hasattr(leaf, "dtype"):
                self._check_dtype(part, value.dtype, whose)
            self._check_bounds(part, value[None] if is_one else value, whose)

    def _check_dtype(self, part: Leaf, dtype: np.dtype[Any], whose: Callable[[int], str]) -> None:
        """Check the dtype of an array or tensor; numbers and lists of Python's have none."""
        if dtype is part.dtype or self._deviations.has("dtype"):
            return
        if not np.can_cast(dtype, part.dtype, "safe") and np.can_cast(dtype, part.dtype, "same_kind"):
            self._deviations.add(
                "dtype",
                f"{whose(0)}: observation{part.path} is {dtype}, expected {part.dtype} as in its space: it is "
                "cast, which may change it",
            )

    def _check_bounds(self, part: Leaf, value: NDArray[Any], whose: Callable[[int], str]) -> None:
        if self._deviations.has("bounds") or value.dtype.kind not in "biuf":
            return
        limits = part.limits()
        if value.shape[1:] != np.shape(limits[0]):
            return  # refused where it is written
        if value.dtype.kind == "f":
            value = value.astype(part.dtype, copy=False)  # as it is recorded
        is_inside = (value >= limits[0]) & (value <= limits[1])  # NaN is not
        if is_inside.all():
            return
        place, *index = np.argwhere(~is_inside)[0].tolist()
        low, high = (np.asarray(limit)[tuple(index)] for limit in limits)
        where = f"{part.path}{index if index else ''}"
        self._deviations.add(
            "bounds",
            f"{whose(place)}: observation{where} is {value[(place, *index)]}, expected {low} to {high}: it is outside "
            "its space, and is recorded as it is",
        )


def checks_of(parts: Sequence[AgentPart], deviations: Deviations | None) -> list[ObservationCheck]:
    """The checks of agents' observations, part by part; None: deviations are collected for these alone."""
    deviations = deviations or Deviations()
    return [ObservationCheck(part.observation_space, deviations) for part in parts]


def refuse_misfit(env: VectorEnv[Any, Any, Any], error: Exception) -> None:
    """Raise EnvError if `error` came from an observation that a slot of a `SyncVectorEnv` gave; else do nothing."""
    if not isinstance(env.unwrapped, SyncVectorEnv):
        return
    observations: Sequence[Tree] = getattr(env.unwrapped, "_env_obs", ())  # gymnasium keeps them nowhere else
    for slot, observation in enumerate(observations):
        text = None if observation is None else misfit_of(env.single_observation_space, observation)
        if text is not None:
            raise EnvError(f"slot {slot}: {text}") from error


def check_reset(answer: Any, where: Any, expected: str = "a tuple (observation, info)") -> None:
    """Raise EnvError for anything but a pair; an array of two rows is none, though it unpacks into two."""
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise EnvError(f"{where}: reset gave {kind_of(answer)}, expected {expected}").see("flags")


def info_given(info: Any, where: str) -> Mapping[str, Any]:
    """The info of one step; an empty one for None. Raises EnvError for anything that is no dict."""
    if info is None:
        return {}
    if not isinstance(info, Mapping):
        raise EnvError(f"{where}: info is {kind_of(info)}, expected a dict").see("flags")
    return info


def kind_of(value: Any) -> str:
    """The kind of a value, for errors: its class and size, or its dtype and shape."""
    if isinstance(value, np.ndarray):
        return f"an array {value.dtype}{list(value.shape)}"
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, Sequence) else "")


def misfit_of(space: Any, observation: Tree) -> str | None:
    """The reason why an observation `any[...]` has no place in a column of its space; None if it has one."""
    if not is_columnar(space):
        return None
    try:
        Column.empty("obs", row_of(space, 1), 1).write_slot(0, 0, observation)
    except (ColumnError, ValueError) as error:
        return f"an observation that is not in its space: {error}"
    return None


class ObservationRows:
    """Makes a tree of arrays `any[K, ...]`, copies in the space's dtypes, from K items of one space."""

    def __init__(self, space: gym.Space[Any]) -> None:
        item = item_of(space)
        self._space = space
        self._spec = optree.tree_structure(item, none_is_leaf=True)
        self._leaves = [(leaf.shape, leaf.dtype) for leaf in leaves_of(item)]
        self._is_nested = isinstance(item, dict | tuple)

    def __call__(self, items: Sequence[Tree], whose: Callable[[int], str]) -> Tree:
        """The rows of these items.

        `whose` says for an error whose item it is, by its place in the sequence. Raises EnvError for an item that is
        not of the space's structure, shapes and kinds of dtypes.
        """
        if not items:
            return row_of(self._space, 0)
        if not self._is_nested:
            rows = _rows(items, *self._leaves[0])
            return self._one_by_one(items, whose) if rows is None else rows
        try:
            leaves = list(zip(*map(self._spec.flatten_up_to, items), strict=True))
        except ValueError:
            return self._one_by_one(items, whose)
        columns = [_rows(leaf, *like) for leaf, like in zip(leaves, self._leaves, strict=True)]
        if any(rows is None for rows in columns):
            return self._one_by_one(items, whose)
        return self._spec.unflatten(columns)

    def _one_by_one(self, items: Sequence[Tree], whose: Callable[[int], str]) -> Tree:
        column = Column.empty("obs", row_of(self._space, len(items)), 1)
        for place, item in enumerate(items):
            try:
                column.write_slot(0, place, item)
            except (ColumnError, ValueError) as error:
                raise EnvError(f"{whose(place)}: an observation that is not in its space: {error}").see(
                    "spaces"
                ) from None
        return column.row(0)


def _rows(values: Sequence[Any], shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """The values as one array; None if they don't all fit."""
    try:
        rows = np.array(values)
        check_range(rows, dtype, "an observation")
    except (TypeError, ValueError, RuntimeError):  # tensors raise others than numpy
        return None
    if rows.shape != (len(values), *shape) or not np.can_cast(rows.dtype, dtype, "same_kind"):
        return None
    return rows.astype(dtype, copy=False)


def rewards_of(rewards: Sequence[Any], named: Callable[[int], str] = "slot {}".format) -> NDArray[Any]:
    """The rewards of all slots as an array number[N]. Raises EnvError, with the slot's name, if one is no number."""
    try:
        array = np.array(rewards)
        if array.ndim == 1 and array.dtype.kind in "fiub":
            return array
    except (TypeError, ValueError, RuntimeError):  # of different shapes, or tensors of some devices
        pass
    values = [number_of(reward) for reward in rewards]
    if None in values:
        slot = values.index(None)
        raise EnvError(f"{named(slot)}: its reward is {shown(rewards[slot])}, expected one number").see("flags")
    return np.array(values, np.float64)


def number_of(value: Any) -> float | None:
    """The real number that a value is, as a float; None if it is none.

    Numbers are Python's, with Decimal and Fraction, numpy's, and arrays and tensors with one element.
    """
    try:
        if isinstance(value, Real | Decimal):
            return float(value)
        array = np.asarray(value if hasattr(value, "__array__") else None)
        return float(array.item()) if array.size == 1 and array.dtype.kind in "fiub" else None
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
