"""Comparison of the spaces that a policy was trained for with those of another environment, field by field."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, Literal

import numpy as np
from gymnasium import spaces

from rollflow.nodes.connectors.spaces import Space

Kind = Literal["came", "went", "reordered", "rescaled", "retyped"]
Bounds = tuple[Any, Any]


@dataclass(frozen=True)
class FieldChange:
    """One difference between the space of a policy and that of an environment.

    kind        "came", "went", "reordered", "rescaled" or "retyped", seen from the policy
    field       path of the field, such as `observation[4]` or `observation['speed']`
    old, new    text of the field in the policy's space and in the environment's; empty where it has none
    proposal    what a connector is to do
    """

    kind: Kind
    field: str
    old: str
    new: str
    proposal: str

    def __str__(self) -> str:
        change = " → ".join(text for text in (self.old, self.new) if text)
        return f"{self.field} {self.kind}: {change}; {self.proposal}"


@dataclass(frozen=True)
class SignatureReport:
    """All differences between the signature of a policy and that of an environment; false where there are none."""

    observation: tuple[FieldChange, ...]
    action: tuple[FieldChange, ...]

    @property
    def changes(self) -> tuple[FieldChange, ...]:
        """The changes of observations, then those of actions."""
        return (*self.observation, *self.action)

    def __bool__(self) -> bool:
        return bool(self.changes)

    def __str__(self) -> str:
        return "\n".join(map(str, self.changes)) or "the signatures are the same"


def compare_signatures(policy: Any, environment: Any) -> SignatureReport:
    """The differences between two signatures: objects with `observation_space` and `action_space`."""
    observed = compare_spaces(policy.observation_space, environment.observation_space, "observation")
    acted = compare_spaces(policy.action_space, environment.action_space, "action")
    return SignatureReport(tuple(observed), tuple(acted))


def compare_spaces(old: Space, new: Space, field: str) -> list[FieldChange]:
    """The differences of a policy's space `old` from an environment's space `new`.

    field    "observation", or "action", for which a connector works the other way round; parts have paths behind it

    Vectors are compared number by number: by bounds, as they have no names.
    """
    return list(_changes(old, new, field))


def _changes(old: Space, new: Space, field: str) -> Iterator[FieldChange]:
    if isinstance(old, spaces.Dict) and isinstance(new, spaces.Dict):
        for key in sorted(set(old.spaces) | set(new.spaces), key=str):
            path = f"{field}[{key!r}]"
            if key not in new.spaces:
                yield _went(path, str(old[key]))
            elif key not in old.spaces:
                yield _came(path, str(new[key]))
            else:
                yield from _changes(old[key], new[key], path)
    elif isinstance(old, spaces.Tuple) and isinstance(new, spaces.Tuple):
        yield from _of_tuples(old.spaces, new.spaces, field)
    else:
        yield from _of_leaves(old, new, field)


def _of_tuples(old: Sequence[Space], new: Sequence[Space], field: str) -> Iterator[FieldChange]:
    order = _order(list(map(str, old)), list(map(str, new)))
    if order is not None:
        yield _reordered(field, order, f"{len(old)} parts")
        return
    for place in range(max(len(old), len(new))):
        path = f"{field}[{place}]"
        if place >= len(new):
            yield _went(path, str(old[place]))
        elif place >= len(old):
            yield _came(path, str(new[place]))
        else:
            yield from _changes(old[place], new[place], path)


def _of_leaves(old: Space, new: Space, field: str) -> Iterator[FieldChange]:
    before, after = _numbers(old), _numbers(new)
    is_other = type(old) is not type(new) or old.dtype != new.dtype
    if before is None or after is None:
        if is_other or old.shape != new.shape:
            yield _retyped(field, old, new)
        elif old != new:
            yield _rescaled(field, str(old), str(new))
        return
    if is_other or (old.shape == ()) != (new.shape == ()):
        yield _retyped(field, old, new)
    if len(before) == len(after):
        yield from _of_same_length(before, after, field, single=old.shape == new.shape == ())
    else:
        yield from _of_other_length(before, after, field)


def _of_same_length(old: list[Bounds], new: list[Bounds], field: str, *, single: bool) -> Iterator[FieldChange]:
    order = _order(old, new)
    if order is not None:
        yield _reordered(field, order, f"{len(old)} numbers")
        return
    for place, (before, after) in enumerate(zip(old, new, strict=True)):
        if before != after:
            yield _rescaled(field if single else f"{field}[{place}]", _text(before), _text(after))


def _of_other_length(old: list[Bounds], new: list[Bounds], field: str) -> Iterator[FieldChange]:
    shorter, longer = (old, new) if len(old) < len(new) else (new, old)
    blocks = SequenceMatcher(None, shorter, longer, autojunk=False).get_matching_blocks()
    matched = {block.b + i for block in blocks for i in range(block.size)}
    if len(matched) < len(shorter):  # bounds do not say which is which: by place
        matched = set(range(len(shorter)))
        for place, (before, after) in enumerate(zip(old, new, strict=False)):
            if before != after:
                yield _rescaled(f"{field}[{place}]", _text(before), _text(after))
    for place, bounds in enumerate(longer):
        if place not in matched:
            make = _came if longer is new else _went
            yield make(f"{field}[{place}]", _text(bounds))


def _order(old: Sequence[Any], new: Sequence[Any]) -> list[int] | None:
    """Places in `new` of the items of `old`; None where they are in the same order, or not the same items."""
    if len(old) != len(new) or list(old) == list(new) or sorted(map(str, old)) != sorted(map(str, new)):
        return None
    left = list(range(len(new)))
    order: list[int] = []
    for item in old:
        place = next(place for place in left if str(new[place]) == str(item))
        left.remove(place)
        order.append(place)
    return order


def _numbers(space: Space) -> list[Bounds] | None:
    """(low, high) of each number of an item that is one, or a vector; None for anything else."""
    if isinstance(space, spaces.Discrete):
        return [(int(space.start), int(space.start + space.n - 1))]
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
        last = space.start + space.nvec - 1
        return list(zip(space.start.tolist(), last.tolist(), strict=True))
    if isinstance(space, spaces.MultiBinary) and len(space.shape) == 1:
        return [(0, 1)] * space.shape[0]
    if isinstance(space, spaces.Box) and len(space.shape) <= 1:
        return list(zip(np.ravel(space.low).tolist(), np.ravel(space.high).tolist(), strict=True))
    return None


def _text(bounds: Bounds) -> str:
    return f"{bounds[0]:.6g} … {bounds[1]:.6g}"


def _of_action(field: str) -> bool:
    return field.startswith("action")


def _came(field: str, new: str) -> FieldChange:
    proposal = "an action connector adds a value for it" if _of_action(field) else "an agent connector drops it"
    return FieldChange("came", field, "", new, proposal)


def _went(field: str, old: str) -> FieldChange:
    proposal = "an action connector drops it" if _of_action(field) else "an agent connector fills in a value for it"
    return FieldChange("went", field, old, "", proposal)


def _reordered(field: str, order: list[int], old: str) -> FieldChange:
    if _of_action(field):
        order = [order.index(place) for place in range(len(order))]
    connector = "an action connector" if _of_action(field) else "an agent connector"
    text = f"in the order {order}"
    return FieldChange("reordered", field, old, text, f"{connector} takes the items at {order}")


def _rescaled(field: str, old: str, new: str) -> FieldChange:
    connector = "an action connector" if _of_action(field) else "an agent connector"
    ends = f" from {old} to {new}" if _of_action(field) else f" from {new} to {old}"
    ends = "" if "inf" in ends else ends
    return FieldChange("rescaled", field, old, new, f"{connector} scales it{ends}, if the unit is another one")


def _retyped(field: str, old: Space, new: Space) -> FieldChange:
    made = f"makes {new} of {old}" if _of_action(field) else f"makes {old} of {new}"
    connector = "an action connector" if _of_action(field) else "an agent connector"
    return FieldChange("retyped", field, str(old), str(new), f"{connector} {made}")
