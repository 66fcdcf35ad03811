"""Differences between two saved policies, place by place, without anything of theirs being run."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rollflow.nodes.policies.artifact_files import arrays_of, read_files

_UNCOMPARED = {"files", "computed_by"}
_LONGEST = 60
_ABSENT = object()


def differences(left: str | os.PathLike[str], right: str | os.PathLike[str]) -> list[str]:
    """A line for each place at which two saved policies differ: `-` it went, `+` it came, `~` it changed.

    Raises PolicyError for a policy that can't be read.
    """
    (manifest, files), (other, other_files) = read_files(Path(left)), read_files(Path(right))
    before, after = ({k: v for k, v in each.items() if k not in _UNCOMPARED} for each in (manifest, other))
    lines = list(_changes(dict(_places(before, "")), dict(_places(after, ""))))
    for name in ("module.safetensors", "state.safetensors"):
        lines += _array_changes(name, arrays_of(files[name], name), arrays_of(other_files[name], name))
    return lines


def _places(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    """(place, value) of every plain value; pieces and parts of Dict spaces go by their names, not their numbers."""
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from _places(each, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list) and value and (names := _names(value)) is not None:
        yield f"{where} (order)", ", ".join(names)
        for name, each in zip(names, value, strict=True):
            yield from _places(each[1] if isinstance(each, list) else each, f"{where}[{name}]")
    else:
        yield where, value


def _names(items: list[Any]) -> list[str] | None:
    """The names of the items of a list; None where they have none, or two have the same."""
    if all(isinstance(each, dict) and isinstance(each.get("name"), str) for each in items):
        names = [each["label"] or each["name"].removeprefix("rollflow.") for each in items]
    elif all(isinstance(each, list) and len(each) == 2 and isinstance(each[0], str) for each in items):
        names = [each[0] for each in items]
    else:
        return None
    return names if len(set(names)) == len(names) else None


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    for place in dict.fromkeys([*before, *after]):
        old, new = before.get(place, _ABSENT), after.get(place, _ABSENT)
        if old is _ABSENT:
            yield f"+ {place}: {_short(new)}"
        elif new is _ABSENT:
            yield f"- {place}: {_short(old)}"
        elif old != new:
            yield f"~ {place}: {_short(old)} → {_short(new)}"


def _array_changes(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    for key in dict.fromkeys([*before, *after]):
        old, new = before.get(key), after.get(key)
        if old is None or new is None:
            kind: Any = new if old is None else old
            yield f"{'+' if old is None else '-'} {name}: {key} {kind.dtype}{list(kind.shape)}"
        elif old.shape != new.shape or old.dtype != new.dtype:
            yield f"~ {name}: {key} {old.dtype}{list(old.shape)} → {new.dtype}{list(new.shape)}"
        elif not np.array_equal(old, new, equal_nan=old.dtype.kind == "f"):
            yield f"~ {name}: {key} {_spread(old, new)}"


def _spread(old: Any, new: Any) -> str:
    if old.dtype.kind == "b":
        return "has other values"
    apart = np.abs(old.astype(np.float64) - new.astype(np.float64))
    return f"differs by up to {float(np.nanmax(apart)):.3g}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
