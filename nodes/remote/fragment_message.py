"""Fragments as messages of the wire."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rollflow.nodes.workers.fragment_codec import described, restored
from rollflow.stream import wire
from rollflow.stream.column import Column
from rollflow.stream.columns import Columns
from rollflow.stream.errors import WireError
from rollflow.stream.fragment import Fragment, FragmentLayout
from rollflow.stream.space import row_of
from rollflow.stream.space_codec import describe_space, space_of
from rollflow.stream.tree import Tree, leaves_of, map_tree

_KNOWN = {
    Columns.REWARDS: np.float32,
    Columns.TERMINATEDS: np.bool_,
    Columns.TRUNCATEDS: np.bool_,
    Columns.POLICY_VERSION: np.int64,
}


def message_of(turn: wire.Turn, fragment: Fragment, more: Mapping[str, Any]) -> wire.Fragment:
    """The answer to a turn, and what else there is to say with it; the columns are referred to, not copied."""
    columns = {
        name: column.rows(0, fragment.last_row + (name == Columns.OBS)) for name, column in fragment.columns.items()
    }
    assert fragment.observation_space is not None
    # A list in place of a tuple is the same to the wire, and not to whoever maps over a tree.
    forms = {name: map_tree(lambda leaf: leaf[0, :0], column.tree) for name, column in fragment.columns.items()}
    told = {"forms": forms, "observation_space": describe_space(fragment.observation_space)}
    return wire.Fragment(turn.lane, turn.number, columns, described(fragment) | told | dict(more))


def fragment_of(message: wire.Fragment, layout: FragmentLayout, lost: str | None = None) -> Fragment:
    """The fragment in an answer, its columns where they came; read-only.

    lost    why the environments were lost before it; None: they were not

    Raises WireError where it is none.
    """
    where = f"fragment {message.number} of lane {message.lane}"
    try:
        rest = message.rest
        rows = rest["num_rows"]
        if not 0 <= rows <= layout.num_rows:
            raise WireError(f"{where}: {rows} rows, expected 0 to {layout.num_rows}", "fragment")
        space = space_of(rest["observation_space"])
        columns = {
            name: Column(name, _formed(tree, rest["forms"][name], f"{where}: {name}"))
            for name, tree in message.columns.items()
        }
        _check(columns, layout, rows, space, where)
        fragment = restored(layout, message.lane, columns, rest, space)
        if lost is not None:
            fragment.begin_after_loss(lost)
        assert fragment.chunks is not None  # made now, and kept: what does not fit together is found here
        return fragment
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        if isinstance(error, WireError):
            raise
        raise WireError(f"{where} is no fragment: {type(error).__name__}: {error}", "fragment") from error


def _formed(tree: Tree, form: Tree, where: str) -> Tree:
    """A tree with tuples where a form has them. Raises WireError where it differs from that otherwise."""
    if isinstance(form, dict) and isinstance(tree, dict) and tree.keys() == form.keys():
        return {key: _formed(tree[key], part, f"{where}[{key!r}]") for key, part in form.items()}
    if isinstance(form, tuple | list) and isinstance(tree, list) and len(tree) == len(form):
        parts = [_formed(part, like, f"{where}[{i}]") for i, (part, like) in enumerate(zip(tree, form, strict=True))]
        return type(form)(parts)
    if isinstance(form, np.ndarray) and isinstance(tree, np.ndarray):
        return tree
    raise WireError(f"{where} differs from its form", "fragment")


def _check(columns: Mapping[str, Column], layout: FragmentLayout, rows: int, space: gym.Space[Any], where: str) -> None:
    """Raise WireError where the columns are not those of so many rows."""
    slots, most = layout.num_slots, layout.lookback + rows
    for name, column in columns.items():
        expected = most + (name == Columns.OBS)
        for leaf in leaves_of(column.tree):
            if leaf.shape[:2] != (expected, slots):
                raise WireError(f"{where}: {name} is {_shown(leaf)}, expected [{expected}, {slots}, …]", "fragment")
    known: dict[str, Tree] = {name: np.zeros(slots, dtype) for name, dtype in _KNOWN.items()}
    known |= {Columns.OBS: row_of(space, slots), Columns.ACTIONS: row_of(layout.action_space, slots)}
    for name, row in known.items():
        map_tree(partial(_check_leaf, f"{where}: {name}"), columns[name].tree, row)


def _check_leaf(where: str, leaf: NDArray[Any], row: NDArray[Any]) -> None:
    if leaf.dtype != row.dtype or leaf.shape[1:] != row.shape:
        raise WireError(f"{where} is {_shown(leaf)}, expected rows of {_shown(row)}", "fragment")


def _shown(array: NDArray[Any]) -> str:
    return f"{array.dtype}{list(array.shape)}"
