"""Checks of a fragment that a host sends against its layout: later nobody would know whose fault it was."""

from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rollflow.nodes.argument_checks import is_whole
from rollflow.stream.data.column import Column
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import WireError, shown
from rollflow.stream.data.space import row_of
from rollflow.stream.data.tree import Tree, leaves_of, map_tree
from rollflow.stream.fragments.fragment import Fragment, FragmentLayout
from rollflow.stream.wire.codec.rows import check_infos

MOST = 1 << 62
_KNOWN = {
    Columns.REWARDS: np.dtype(np.float32),
    Columns.TERMINATEDS: np.dtype(np.bool_),
    Columns.TRUNCATEDS: np.dtype(np.bool_),
    Columns.POLICY_VERSION: np.dtype(np.int64),
}


def check_columns(
    columns: Mapping[str, Column], layout: FragmentLayout, rows: int, space: gym.Space[Any], spare: int = 0
) -> None:
    """Raise WireError where the columns are not those of so many rows, with observations in this space.

    spare    rows behind these in all columns but the observations
    """
    slots, most = layout.num_slots, layout.lookback + rows
    for name, column in columns.items():
        expected = most + (1 if name == Columns.OBS else spare)
        for leaf in leaves_of(column.tree):
            if leaf.shape[:2] != (expected, slots):
                raise wrong(f"{name} is {_shown(leaf)}, expected [{expected}, {slots}, …]")
    for name, dtype in _KNOWN.items():
        _check_rows(name, columns[name].tree, dtype, (slots,))
    for name, of in ((Columns.OBS, space), (Columns.ACTIONS, layout.action_space)):
        tree = columns[name].tree
        if isinstance(tree, np.ndarray) and of.shape is not None and of.dtype is not None:  # without a row made for it
            _check_rows(name, tree, of.dtype, (slots, *of.shape))
        else:
            map_tree(
                lambda leaf, row, name=name: _check_rows(name, leaf, row.dtype, row.shape), tree, row_of(of, slots)
            )


def form_of(columns: Mapping[str, Column]) -> dict[str, Tree]:
    """Dtypes and shapes of columns' rows, leaf by leaf as text: the same in every fragment of a rollout."""
    return {name: map_tree(_form, column.tree) for name, column in columns.items()}


def check_form(form: Mapping[str, Tree], known: Mapping[str, Tree]) -> None:
    """Raise WireError where columns are others, or of another form, than in the fragments before."""
    if form.keys() != known.keys():
        raise wrong(f"columns are {sorted(form)}, expected {sorted(known)}, as in others")
    for name, each in form.items():
        if each != known[name]:
            raise wrong(f"a row of {name} is {shown(each)} in each slot, expected {shown(known[name])}, as in others")


def check_rest(rest: Mapping[str, Any], layout: FragmentLayout, rows: int, space: gym.Space[Any]) -> None:
    """Raise WireError where what there is to say beside the columns is not of a fragment of so many rows."""
    first, last, slots = layout.lookback, layout.lookback + rows, layout.num_slots
    check_whole("sequence", rest["sequence"], 0, MOST)
    check_array("episode_start", rest["episode_start"], np.int64, (slots,), -MOST, first + 1)
    losses = rest.get("losses", ())
    check_array("episode_number", rest["episode_number"], np.int64, (slots,), -1 if losses else 0)
    if losses:
        _check_losses(losses, rest["episode_number"], first, last)
    for slot, number, data in rest.get("custom_data", ()):
        check_whole("custom_data: slot", slot, 0, slots - 1)
        check_whole("custom_data: episode", number, -1, MOST)
        if not isinstance(data, dict):
            raise wrong(f"custom_data is {shown(data)}, expected a map")
    if rest.get("infos") is not None:
        _check_infos("infos", rest["infos"], last + 1, slots)
    if rest.get("finals") is not None:
        _check_finals(rest["finals"], first, last, slots, space)
    for rows_of, slots_of, states in rest.get("starts", ()):
        count = len(rows_of)
        check_array("starts: rows", rows_of, np.int64, (count,), first, last)
        check_array("starts: slots", slots_of, np.int64, (count,), 0, slots - 1)
        map_tree(partial(_check_states, count), states)


def check_ends(fragment: Fragment) -> None:
    """Raise WireError where last observations are of episodes that do not end where they are said to."""
    if not fragment.finals:
        return
    chunks = fragment.chunks
    ends = set(zip(chunks.stop.tolist(), chunks.slot.tolist(), strict=True))
    for final in fragment.finals:
        for row, slot in final.keys():
            if (row + 1, slot) not in ends:
                raise wrong(f"finals: no episode of slot {slot} ends in row {row}, expected one")


def check_whole(name: str, value: Any, least: int, most: int) -> None:
    """Raise WireError for what is no whole number in this range."""
    if not is_whole(value) or not least <= value <= most:
        raise wrong(f"{name} is {shown(value)}, expected a whole number from {least} to {most}")


def check_array(
    name: str, value: Any, dtype: Any, shape: tuple[int, ...], least: int | None = None, most: int = MOST
) -> None:
    """Raise WireError for what is no such array, of numbers in a range."""
    if not isinstance(value, np.ndarray) or value.dtype != dtype or value.shape != shape:
        raise wrong(f"{name} is {shown(value)}, expected {np.dtype(dtype)}{list(shape)}")
    if least is not None and np.count_nonzero((value < least) | (value > most)):
        raise wrong(f"{name} is {shown(value)}, expected numbers from {least} to {most}")


def _form(leaf: NDArray[Any]) -> str:
    return f"{_named(leaf.dtype)}{list(leaf.shape[2:])}"


@lru_cache(64)
def _named(dtype: np.dtype[Any]) -> str:
    return str(dtype)  # takes numpy 4 µs


def _check_states(count: int, leaf: Any) -> None:
    if not isinstance(leaf, np.ndarray) or leaf.shape[:1] != (count,):
        raise wrong(f"starts: states are {_shown(leaf)}, expected [{count}, …]")


def _check_losses(losses: Any, numbers: NDArray[np.int64], first: int, last: int) -> None:
    slots = len(numbers)
    least = np.zeros(slots, np.int64)
    for row, lost, cut, reason in losses:
        check_whole("losses: row", row, first, last)
        check_array("losses: slots", lost, np.int64, (len(lost),), 0, slots - 1)
        check_array("losses: cut", cut, np.int64, (len(cut),), 0, slots - 1)
        if not isinstance(reason, str):
            raise wrong(f"losses: the reason is {shown(reason)}, expected a string")
        if row == first:
            least[lost] = -1  # what was lost before it may have been nothing
    if np.count_nonzero(numbers < least):
        raise wrong(f"episode_number is {shown(numbers)}, expected numbers from 0 to {MOST}")


def _check_finals(finals: Mapping[str, Any], first: int, last: int, slots: int, space: gym.Space[Any]) -> None:
    count, counts, infos = len(finals["rows"]), finals["counts"], finals["infos"]
    check_array("finals: rows", finals["rows"], np.int64, (count,), first, last - 1)
    check_array("finals: slots", finals["slots"], np.int64, (count,), 0, slots - 1)
    map_tree(partial(_check_items, "finals"), finals["observations"], row_of(space, count))
    if infos is not None:
        _check_infos("finals: infos", infos, count, slots)
        if not all(map(is_whole, counts)) or min(counts, default=0) < 0 or sum(counts) != count:
            raise wrong(f"finals: counts are {shown(counts)}, expected those of {count} observations")
        if len(infos) != len(counts):
            raise wrong(f"finals: infos of {len(infos)} rows, expected {len(counts)}")


def _check_infos(name: str, infos: Any, most: int, slots: int) -> None:
    if not isinstance(infos, list) or len(infos) > most:
        raise wrong(f"{name} is {shown(infos)}, expected a list of at most {most} maps")
    for each in infos:
        if not isinstance(each, Mapping):
            raise wrong(f"{name}: {shown(each)}, expected a map")
        check_infos(each, slots, name)


def _check_rows(name: str, leaf: Any, dtype: Any, shape: tuple[int, ...]) -> None:
    if not isinstance(leaf, np.ndarray) or leaf.dtype != dtype or leaf.shape[1:] != shape:
        found = _shown(leaf) if isinstance(leaf, np.ndarray) else shown(leaf)
        raise wrong(f"{name} is {found}, expected rows of {np.dtype(dtype)}{list(shape)}")


def _check_items(name: str, leaf: Any, like: NDArray[Any]) -> None:
    if not isinstance(leaf, np.ndarray) or leaf.dtype != like.dtype or leaf.shape != like.shape:
        raise wrong(f"{name}: observations are {shown(leaf)}, expected {_shown(like)}")


def wrong(text: str) -> WireError:
    """The error of a fragment that makes no sense."""
    return WireError(text, "fragment")


def _shown(array: NDArray[Any]) -> str:
    return f"{array.dtype}{list(array.shape)}"
