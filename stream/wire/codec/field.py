"""Checks of message fields: functions of a value and its path that return the value, or raise WireError.

A message names the check of each field in the field's type: `Annotated[int, whole(0, 10)]`.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, get_type_hints

import numpy as np

from rollflow.stream.data import errors
from rollflow.stream.data.errors import WireError
from rollflow.stream.data.infos import SlotInfos

Check = Callable[[Any, str], Any]


def shown(value: Any) -> str:
    """A value as a short text, for errors."""
    if isinstance(value, np.ndarray):
        return f"an array {value.dtype.str}{list(value.shape)}"
    return errors.shown(value)


def wrong(value: Any, where: str, expected: str) -> WireError:
    """The error for a field with a wrong value."""
    return WireError(f"{where} is {shown(value)}, expected {expected}")


def check_that(is_right: Callable[[Any], bool], expected: str) -> Check:
    """A value for which `is_right` is true."""

    def check(value: Any, where: str) -> Any:
        if not is_right(value):
            raise wrong(value, where, expected)
        return value

    return check


def whole(least: int, most: int) -> Check:
    """A whole number from `least` to `most`; checked in one call, since every message has some."""

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


flag = check_that(lambda value: type(value) is bool, "true or false")


def text(most: int) -> Check:
    """A string of at most `most` characters."""
    return check_that(lambda value: type(value) is str and len(value) <= most, f"a string of at most {most} characters")


def _is_agent_id(value: Any) -> bool:
    return (type(value) is str and len(value) <= 256) or (type(value) is int and abs(value) < 1 << 53)


agent_id = check_that(_is_agent_id, "a string of at most 256 characters, or a whole number")  # of at most 53 bits


def raw(*lengths: int) -> Check:
    """Bytes of one of these lengths."""
    expected = f"{' or '.join(map(str, lengths))} bytes"
    return check_that(lambda value: type(value) is bytes and len(value) in lengths, expected)


def one_of(*names: str) -> Check:
    """One of these strings."""
    return check_that(lambda value: type(value) is str and value in names, f"one of {', '.join(names)}")


def nullable(check: Check) -> Check:
    """Nil, or a value that `check` takes."""
    return lambda value, where: None if value is None else check(value, where)


def list_of(check: Check, most: int) -> Check:
    """At most `most` values that `check` takes, as a tuple."""

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
    """A map with the fields of a dataclass, as an instance of it."""

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


def entries(**checks: Check) -> Check:
    """A map with these entries, a missing one as None, without any others."""

    def check_all(value: Any, where: str) -> dict[str, Any]:
        given = mapping(value, where)
        return {name: check(given.get(name), f"{where}.{name}") for name, check in checks.items()}

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
    """An array `dtype[n]` of one dimension."""
    kind = np.dtype(dtype)
    return check_that(
        lambda value: isinstance(value, np.ndarray) and value.dtype == kind and value.ndim == 1,
        f"an array {kind.str}[slots]",
    )


array = check_that(  # any[...]
    lambda value: isinstance(value, np.ndarray) and value.dtype.kind in "biufc", "an array of numbers"
)


def tree(value: Any, where: str) -> Any:
    """A tree of arrays of numbers `any[...]`: an array, or a map or list of trees; a tuple becomes a list."""
    if isinstance(value, np.ndarray):
        return array(value, where)
    if isinstance(value, list | tuple):
        return [tree(part, f"{where}[{index}]") for index, part in enumerate(value)]
    if type(value) is dict:
        return {key: tree(part, f"{where}[{key!r}]") for key, part in mapping(value, where).items()}
    raise wrong(value, where, "an array, or a map or list of arrays")


@cache
def checks_of(kind: type) -> dict[str, Check]:
    """The check of every field of a dataclass, in order."""
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name].__metadata__[0] for field in dataclasses.fields(kind)}


@cache
def defaults_of(kind: type) -> dict[str, Any]:
    """The default values of a dataclass's fields that have one: None or another singleton."""
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    return {name: default for name, default in defaults.items() if default is not dataclasses.MISSING}


def checked_fields(kind: type, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of a dataclass from a map, each checked; unknown keys are ignored.

    Fields with a default may be missing.
    """
    fields = {}
    for name, check in checks_of(kind).items():
        if name not in values:
            if name in defaults_of(kind):
                continue
            raise WireError(f"{where} has no field {name!r}, expected {', '.join(checks_of(kind))}")
        fields[name] = check(values[name], f"{where}.{name}")
    return fields
