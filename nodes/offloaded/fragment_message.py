"""Fragments as messages of the wire."""

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from rollflow.nodes.offloaded.fragment_checks import check_columns, check_ends, check_rest, check_whole
from rollflow.nodes.offloaded.fragment_codec import described, restored
from rollflow.stream import wire
from rollflow.stream.data.column import Column
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import WireError
from rollflow.stream.data.tree import Tree, map_tree
from rollflow.stream.fragments.fragment import Fragment, FragmentLayout
from rollflow.stream.wire.codec import field


def message_of(
    lane: int, number: int, fragment: Fragment, more: Mapping[str, Any], spaces: Sequence[gym.Space[Any]]
) -> wire.Fragment:
    """A fragment under a number, and what else there is to say with it; the columns are referred to, not copied.

    spaces    that its observations may be in, the same at both ends
    """
    columns = {
        name: column.rows(0, fragment.last_row + (name == Columns.OBS)) for name, column in fragment.columns.items()
    }
    form_fields = {"forms": forms_of(fragment.columns), "space": index_of(fragment.observation_space, spaces)}
    return wire.Fragment(lane, number, columns, described(fragment) | form_fields | dict(more))


def fragment_of(
    message: wire.Fragment, layout: FragmentLayout, spaces: Sequence[gym.Space[Any]], lost: str | None = None
) -> Fragment:
    """The fragment in an answer, its columns where they came; read-only.

    spaces    that its observations may be in, the same at both ends
    lost      why the environments were lost before it; None: they were not

    Raises WireError where it is none.
    """
    try:
        rest = message.rest
        rows, which, forms = rest["num_rows"], rest["space"], field.mapping(rest["forms"], "forms")
        check_whole("num_rows", rows, 0, layout.num_rows)
        check_whole("space", which, 0, len(spaces) - 1)
        space = spaces[which]
        columns = {name: Column(name, formed(tree, forms.get(name), name)) for name, tree in message.columns.items()}
        check_columns(columns, layout, rows, space)
        check_rest(rest, layout, rows, space)
        fragment = restored(layout, message.lane, columns, rest, space)
        if lost is not None:
            fragment.begin_after_loss(lost)
        check_ends(fragment)
        return fragment
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        if isinstance(error, WireError):
            raise
        raise WireError(f"it is no fragment: {type(error).__name__}: {error}", "fragment") from error


def forms_of(columns: Mapping[str, Column]) -> dict[str, Tree]:
    """Trees of empty arrays for columns that are trees: the wire has lists in place of tuples."""
    return {
        name: map_tree(lambda leaf: leaf[0, :0], column.tree)
        for name, column in columns.items()
        if not isinstance(column.tree, np.ndarray)
    }


def index_of(space: gym.Space[Any] | None, spaces: Sequence[gym.Space[Any]]) -> int:
    """The index of a space among others: of itself, else of an equal one, as after a way between processes."""
    for place, other in enumerate(spaces):
        if other is space:
            return place
    return list(spaces).index(space)  # type: ignore[arg-type]


def formed(tree: Tree, form: Tree, where: str) -> Tree:
    """A tree with tuples where a form has them. Raises WireError where it differs from that otherwise.

    form    None: it is an array
    """
    if isinstance(tree, np.ndarray) and (form is None or isinstance(form, np.ndarray)):
        return tree
    if isinstance(form, dict) and isinstance(tree, dict) and tree.keys() == form.keys():
        return {key: formed(tree[key], part, f"{where}[{key!r}]") for key, part in form.items()}
    if isinstance(form, tuple | list) and isinstance(tree, list | tuple) and len(tree) == len(form):
        parts = [formed(part, like, f"{where}[{i}]") for i, (part, like) in enumerate(zip(tree, form, strict=True))]
        return type(form)(parts)
    raise WireError(f"{where} differs from its form", "fragment")
