"""What a message's field may be: a check that takes a value and the way to it, and gives the value or raises WireError.

A message names the check of each of its fields in the field's own type: `Annotated[int, whole(0, 10)]`.
"""

import dataclasses
import math
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

import numpy as np

from rollflow.stream.errors import WireError
from rollflow.stream.infos import SlotInfos
from rollflow.stream.wire.joined import Joined

Check = Callable[[Any, str], Any]


def shown(value: Any) -> str:
    """A value in a few words, for messages."""
    if isinstance(value, np.ndarray):
        return f"an array {value.dtype.str}{list(value.shape)}"
    return reprlib.repr(value)


def wrong(value: Any, where: str, expected: str) -> WireError:
    """The error for a field that is not what it should be."""
    return WireError(f"{where} is {shown(value)}, expected {expected}")


def whole(least: int, most: int) -> Check:
    """A whole number from `least` to `most`."""

    def check(value: Any, where: str) -> int:
        if type(value) is not int or not least <= value <= most:
            raise wrong(value, where, f"a whole number from {least} to {most}")
        return value

    return check


def seconds(value: Any, where: str) -> float:
    """A number of seconds, more than 0."""
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise wrong(value, where, "a number of seconds, more than 0")
    return float(value)


def flag(value: Any, where: str) -> bool:
    """True or false."""
    if type(value) is not bool:
        raise wrong(value, where, "true or false")
    return value


def text(most: int) -> Check:
    """A string of at most so many characters."""

    def check(value: Any, where: str) -> str:
        if type(value) is not str or len(value) > most:
            raise wrong(value, where, f"a string of at most {most} characters")
        return value

    return check


def agent_id(value: Any, where: str) -> str | int:
    """What an agent is called: a string of at most 256 characters, or a whole number of at most 53 bits."""
    is_name, is_number = type(value) is str and len(value) <= 256, type(value) is int and abs(value) < 1 << 53
    if not is_name and not is_number:
        raise wrong(value, where, "a string of at most 256 characters, or a whole number")
    return value  # type: ignore[no-any-return]


def raw(*lengths: int) -> Check:
    """Bytes, as many as one of `lengths` says."""

    def check(value: Any, where: str) -> bytes:
        if type(value) is not bytes or len(value) not in lengths:
            raise wrong(value, where, f"{' or '.join(map(str, lengths))} bytes")
        return value

    return check


def raw_up_to(most: int) -> Check:
    """At most so many bytes."""

    def check(value: Any, where: str) -> bytes:
        if type(value) is not bytes or len(value) > most:
            raise wrong(value, where, f"at most {most} bytes")
        return value

    return check


def one_of(*names: str) -> Check:
    """One of these strings."""

    def check(value: Any, where: str) -> str:
        if type(value) is not str or value not in names:
            raise wrong(value, where, f"one of {', '.join(names)}")
        return value

    return check


def nullable(check: Check) -> Check:
    """Nil, or what `check` takes."""
    return lambda value, where: None if value is None else check(value, where)


def list_of(check: Check, most: int) -> Check:
    """At most so many values, as a tuple."""

    def check_all(value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple) or len(value) > most:
            raise wrong(value, where, f"a list of at most {most} values")
        return tuple([check(item, f"{where}[{index}]") for index, item in enumerate(value)])

    return check_all


def span(least: int, most: int) -> Check:
    """Two whole numbers, the second not below the first, as a tuple."""
    check = list_of(whole(least, most), 2)

    def check_both(value: Any, where: str) -> tuple[int, ...]:
        both: tuple[int, ...] = check(value, where)
        if len(both) != 2 or both[0] > both[1]:
            raise wrong(value, where, "[lowest, highest]")
        return both

    return check_both


def record(kind: type) -> Check:
    """A map with the fields of a dataclass, as one of these."""

    def check(value: Any, where: str) -> Any:
        if isinstance(value, kind):
            return value
        if type(value) is not dict:
            raise wrong(value, where, "a map")
        return kind(**checked_fields(kind, value, where))

    return check


def mapping(value: Any, where: str) -> dict[str, Any]:
    """A map whose keys are strings."""
    if not isinstance(value, Mapping) or isinstance(value, SlotInfos):
        raise wrong(value, where, "a map")
    for key in value:
        if type(key) is not str:
            raise wrong(key, f"a key of {where}", "a string")
    return dict(value)


def map_of(check: Check) -> Check:
    """A map from strings to what `check` takes."""

    def check_all(value: Any, where: str) -> dict[str, Any]:
        return {key: check(item, f"{where}[{key!r}]") for key, item in mapping(value, where).items()}

    return check_all


def infos(value: Any, where: str) -> Mapping[str, Any]:
    """Infos: a map in gymnasium's vector form, or SlotInfos."""
    return value if isinstance(value, SlotInfos) else mapping(value, where)


def agent_infos(value: Any, where: str) -> list[list[Any]]:
    """Infos of one environment's agents: a list of [number of the agent, map]."""
    if not isinstance(value, list | tuple):
        raise wrong(value, where, "a list of [number of an agent, map]")
    for each in value:
        if not isinstance(each, list | tuple) or len(each) != 2 or type(each[0]) is not int:
            raise wrong(each, where, "[number of an agent, map] in it")
        if type(each[1]) is not dict:
            raise wrong(each[1], f"{where}: the info of agent {each[0]}", "a map")
    return [list(each) for each in value]


def numbers(dtype: str) -> Check:
    """An array of this dtype and of one dimension."""
    kind = np.dtype(dtype)

    def check(value: Any, where: str) -> Any:
        if not isinstance(value, np.ndarray) or value.dtype != kind or value.ndim != 1:
            raise wrong(value, where, f"an array {kind.str}[slots]")
        return value

    return check


def octets(value: Any, where: str) -> Any:
    """An array u1[n], or the parts of one."""
    if isinstance(value, Joined):
        return value
    if not isinstance(value, np.ndarray) or value.dtype != np.uint8 or value.ndim != 1:
        raise wrong(value, where, "an array u1[n]")
    return value


def array(value: Any, where: str) -> Any:
    """An array of numbers."""
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biufc":
        raise wrong(value, where, "an array of numbers")
    return value


def tree(value: Any, where: str) -> Any:
    """An array of numbers, or a map or a list of trees; a tuple becomes a list."""
    if isinstance(value, np.ndarray):
        return array(value, where)
    if isinstance(value, list | tuple):
        return [tree(part, f"{where}[{index}]") for index, part in enumerate(value)]
    if type(value) is dict:
        return {key: tree(part, f"{where}[{key!r}]") for key, part in mapping(value, where).items()}
    raise wrong(value, where, "an array, or a map or list of arrays")


def checks_of(kind: type) -> dict[str, Check]:
    """The check of every field of a dataclass, in order."""
    known = _CHECKS.get(kind)
    if known is None:
        hints = get_type_hints(kind, include_extras=True)
        known = _CHECKS[kind] = {field.name: hints[field.name].__metadata__[0] for field in dataclasses.fields(kind)}
    return known


def checked_fields(kind: type, told: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of a dataclass out of a map, each checked; others in the map are passed over.

    One that has a default may be missing.
    """
    fields = {}
    for name, check in checks_of(kind).items():
        if name not in told:
            if name in defaults_of(kind):
                continue
            raise WireError(f"{where} has no field {name!r}, expected {', '.join(checks_of(kind))}")
        fields[name] = check(told[name], f"{where}.{name}")
    return fields


def defaults_of(kind: type) -> dict[str, Any]:
    """The fields of a dataclass that have a default, and that: None, or what is the same wherever it is equal."""
    known = _DEFAULTS.get(kind)
    if known is None:
        given = {field.name: field.default for field in dataclasses.fields(kind)}
        known = _DEFAULTS[kind] = {name: each for name, each in given.items() if each is not dataclasses.MISSING}
    return known


_CHECKS: dict[type, dict[str, Check]] = {}
_DEFAULTS: dict[type, dict[str, Any]] = {}
