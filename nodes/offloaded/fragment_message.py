"""Fragments as messages between processes, of this host or of others."""

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from rollflow.nodes.offloaded.fragment_checks import check_columns, check_ends, check_rest, check_whole
from rollflow.stream import wire
from rollflow.stream.data.column import Column
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import WireError
from rollflow.stream.data.tree import Tree, concatenate_trees, kind_of, map_tree
from rollflow.stream.fragments.fragment import Final, Fragment, FragmentLayout, Loss, Start
from rollflow.stream.wire.codec import field

Plain = dict[str, Any]


def message_of(
    number: int, fragment: Fragment, spaces: Sequence[gym.Space[Any]], more: Mapping[str, Any]
) -> wire.Fragment:
    """A fragment under a number, with `more` in its rest; the columns are referred to, not copied.

    spaces    that its observations may be in, the same at both ends
    """
    columns = {
        name: column.rows(0, fragment.last_row + (name == Columns.OBS)) for name, column in fragment.columns.items()
    }
    form_fields = {"forms": forms_of(fragment.columns), "space": index_of(fragment.observation_space, spaces)}
    return wire.Fragment(fragment.lane, number, columns, described(fragment) | form_fields | dict(more))


def fragment_of(
    message: wire.Fragment,
    layout: FragmentLayout,
    spaces: Sequence[gym.Space[Any]],
    lost: str | None = None,
    *,
    is_checked: bool = True,
) -> Fragment:
    """The fragment in a message, its columns where they came; read-only.

    spaces        that its observations may be in, the same at both ends
    lost          why the environments were lost before it; None: they were not
    is_checked    whether the sender may be anybody

    Raises WireError where it is none.
    """
    try:
        fragment: Fragment = (checked if is_checked else begun)(message, layout, spaces)
        complete(fragment, message.rest)
        fragment.seal(message.rest["num_rows"])
        if lost is not None:
            fragment.begin_after_loss(lost)
        if is_checked:
            check_ends(fragment)
        return fragment
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        if isinstance(error, WireError):
            raise
        raise WireError(f"it is no fragment: {type(error).__name__}: {error}", "fragment") from error


def complete(fragment: Fragment, fields: Mapping[str, Any]) -> None:
    """Give a fragment what `described` said of its ends, losses, infos and custom data."""
    if fields.get("finals") is not None:
        fragment.finals = _finals_of(fields["finals"])
    fragment.starts = [Start(*start) for start in fields.get("starts", ())]
    fragment.losses = [Loss(*loss) for loss in fields.get("losses", ())]
    if fields.get("infos") is not None:
        fragment.infos[: len(fields["infos"])] = fields["infos"]
    fragment.custom_data = {(slot, number): data for slot, number, data in fields.get("custom_data", ())}


def described(fragment: Fragment) -> Plain:
    """Fields of a fragment beside its columns; those of which there is none are left out."""
    fields = {
        "sequence": fragment.sequence,
        "num_rows": fragment.num_rows,
        "episode_start": fragment.episode_start,
        "episode_number": fragment.episode_number,
    }
    if fragment.finals:
        fields["finals"] = _joined(fragment.finals)
    if fragment.starts:
        fields["starts"] = _starts_of(fragment)
    if fragment.losses:
        fields["losses"] = [[each.row, each.slots, each.cut, each.reason] for each in fragment.losses]
    if any(fragment.infos):
        fields["infos"] = fragment.infos
    if fragment.custom_data:
        fields["custom_data"] = [[*key, data] for key, data in fragment.custom_data.items()]
    return fields


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


def checked(
    message: wire.Fragment, layout: FragmentLayout, spaces: Sequence[gym.Space[Any]], spare: int = 0, **more: Any
) -> Any:
    """`begun`, of a message that anybody may have sent. Raises WireError where it makes no sense.

    spare    rows that are behind the others in all columns but the observations
    """
    rest = message.rest
    check_whole("num_rows", rest["num_rows"], 0, layout.num_rows)
    check_whole("space", rest["space"], 0, len(spaces) - 1)
    fragment = begun(message, layout, spaces, **more)
    space = spaces[rest["space"]]
    check_columns(fragment.columns, layout, rest["num_rows"], space, spare)
    check_rest(rest, layout, rest["num_rows"], space)
    return fragment


def begun(
    message: wire.Fragment,
    layout: FragmentLayout,
    spaces: Sequence[gym.Space[Any]],
    *,
    kind: type[Fragment] = Fragment,
    **more: Any,
) -> Any:
    """A fragment of which nothing is known but its columns, and how its episodes began.

    kind, more    class of the fragment, and further arguments of it
    """
    rest = message.rest
    fragment = kind(
        layout,
        message.lane,
        rest["sequence"],
        _formed_columns(message.columns, rest["forms"]),
        episode_start=rest["episode_start"],
        episode_number=rest["episode_number"],
        **more,
    )
    fragment.observation_space = spaces[rest["space"]]
    return fragment


def _formed_columns(trees: Mapping[str, Tree], forms: Any) -> dict[str, Column]:
    """Columns of trees, with tuples where `forms_of` says so."""
    forms = field.mapping(forms, "forms")
    return {name: Column(name, formed(tree, forms.get(name), name)) for name, tree in trees.items()}


def _joined(finals: list[Final]) -> Plain:
    """All last observations as one tree: there may be hundreds."""
    infos = [each.infos for each in finals]
    return {
        "rows": [each.row for each in finals],
        "counts": [len(each.slots) for each in finals],
        "slots": np.concatenate([each.slots for each in finals]),
        "observations": concatenate_trees([each.observations for each in finals]),
        "infos": infos if any(infos) else None,
    }


def _finals_of(fields: Plain) -> list[Final]:
    slots, observations, finals, begin = fields["slots"], fields["observations"], [], 0
    for index, (row, count) in enumerate(zip(fields["rows"], fields["counts"], strict=True)):
        end = begin + count
        items = map_tree(lambda leaf, begin=begin, end=end: leaf[begin:end], observations)
        finals.append(Final(row, slots[begin:end], items, {} if fields["infos"] is None else fields["infos"][index]))
        begin = end
    return finals


def _starts_of(fragment: Fragment) -> list[list[Any]]:
    """Rows, slots and states of a fragment's starts, those of one kind together: there may be hundreds."""
    groups: dict[str, list[Start]] = {}
    for start in fragment.starts:
        groups.setdefault(str(kind_of(start.states)), []).append(start)
    return [
        [
            np.concatenate([each.rows for each in group]),
            np.concatenate([each.slots for each in group]),
            concatenate_trees([each.states for each in group]),
        ]
        for group in groups.values()
    ]
