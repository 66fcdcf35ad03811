"""Checks of plain arguments: numbers, seconds, True or False, seeds, keywords that there are not."""

import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from numbers import Real
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

import numpy as np

from rollflow.stream.data.errors import shown
from rollflow.stream.graph.seeding import fresh_seed, joint_seed

P = ParamSpec("P")
T = TypeVar("T")
_MOST_SEED = 2**63 - 1
_SECONDS = ("step_timeout", "reset_timeout", "join_timeout", "linger", "retry_s")


def is_whole(number: Any) -> bool:
    """True for a whole number, Python's or numpy's, but no bool."""
    return type(number) is int or (isinstance(number, int | np.integer) and not isinstance(number, bool))


def checked_count(name: str, count: Any, least: int) -> int:
    """Return a whole number as an int. Raises ValueError for anything else, a bool, or one below `least`."""
    try:
        number = operator.index(count)
    except TypeError:
        number = least - 1
    if isinstance(count, bool) or number < least:
        raise ValueError(f"{name} is {shown(count)}, expected a whole number from {least} on")
    return number


def checked_number(
    name: str,
    number: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    noun: str = "a number",
    why: str = "",
) -> float:
    """Return a number as a float. Raises ValueError for anything else, and outside the bounds.

    least    may be the number; `above` may not. One of them is given
    most     may be the number; None: any finite one. `math.inf` lets infinity pass
    noun     what was expected
    why      the reason
    """
    is_sound = isinstance(number, Real) and not isinstance(number, bool | np.bool_) and not math.isnan(number)
    is_sound = is_sound and (least is None or number >= least) and (above is None or number > above)
    if not is_sound or (number == math.inf if most is None else number > most):
        has_end = most not in (None, math.inf)
        if least is None:
            bounds = f"above {above:g}" + (f", up to {most:g}" if has_end else "")
        else:
            bounds = f"from {least:g} " + (f"to {most:g}" if has_end else "on")
        raise ValueError(f"{name} is {shown(number)}, expected {noun} {bounds}{why and f': {why}'}")
    return float(number)


def checked_fraction(name: str, number: Any) -> float:
    """Return a number from 0 to 1 as a float. Raises ValueError for anything else."""
    return checked_number(name, number, least=0, most=1)


def check_numbers(**numbers: tuple[float | None, int]) -> None:
    """Raise ValueError for a number that is not whole, or is below the least allowed; None is let pass.

    numbers    name -> (number, least). Names of seconds may be fractions
    """
    for name, (number, least) in numbers.items():
        if number is not None and name in _SECONDS:
            checked_number(name, number, least=least, noun="seconds")
        elif number is not None:
            checked_count(name, number, least)


def check_flags(**flags: Any) -> None:
    """Raise ValueError for a value, by name, that is neither True nor False."""
    for name, flag in flags.items():
        if not isinstance(flag, bool | np.bool_):
            raise ValueError(f"{name} is {shown(flag)}, expected True or False")


def check_names(name: str, names: Any) -> None:
    """Raise ValueError unless `names` is None, or a list or tuple of texts."""
    if names is not None and not (isinstance(names, list | tuple) and all(isinstance(each, str) for each in names)):
        raise ValueError(f"{name} is {shown(names)}, expected None, or a list of names")


def ids_by_text(
    whose: str, ids: Iterable[Any], error: Callable[[str], Exception], text_of: Callable[[Any], str] = str
) -> dict[str, Any]:
    """Text -> id. Raises `error` if two ids, such as 1 and "1", have one text, which is all that files have."""
    found: dict[str, Any] = {}
    for id_ in ids:
        if (other := found.setdefault(text_of(id_), id_)) != id_:
            text = f"the {whose}s {other!r} and {id_!r} have one text as their ids, expected another text"
            raise error(f"{text} for each {whose}")
    return found


def places_in(**records: type) -> dict[str, str]:
    """Keyword -> the record's field that stands for it, also by its name in earlier versions, such as "step_timeout".

    records    keyword -> class of the frozen record that it takes
    """
    return {
        name: f"{keyword}={record.__name__}({each.name}=…)"
        for keyword, record in records.items()
        for each in fields(record)
        for name in (each.name, f"{each.name}_{keyword.rstrip('s')}", f"{keyword}_{each.name}")
    }


def check_keywords(callee: str, given: Iterable[str], known: Collection[str], places: Mapping[str, str]) -> None:
    """Raise TypeError for keywords that there are not, which says what is to be written instead.

    callee    name of the function, or of the class whose `__init__` it is
    known     keywords that it has
    places    keyword that it has not -> its place: see `places_in`
    """

    def instead(name: Any) -> str:
        alike = get_close_matches(str(name), known, 1)
        return places.get(name) or (repr(alike[0]) if alike else f"one of those in help({callee})")

    if wrong := [name for name in given if name not in known]:
        told = "; ".join(f"{name!r}, expected {instead(name)}" for name in wrong)
        raise TypeError(f"{callee} has no keyword {told}")


def checking_keywords(
    callee: str, places: Mapping[str, str] = MappingProxyType({})
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator of a function whose keywords are checked: see `check_keywords`."""

    def checking(function: Callable[P, T]) -> Callable[P, T]:
        known = signature(function).parameters

        @wraps(function)
        def checked(*args: P.args, **given: P.kwargs) -> T:
            check_keywords(callee, given, known, places)
            return function(*args, **given)

        return checked

    return checking


def checking_constructor(**places: str) -> Callable[[type[T]], type[T]]:
    """Decorator of a class whose constructor's keywords are checked: see `check_keywords`."""

    def checking(cls: type[T]) -> type[T]:
        cls.__init__ = checking_keywords(cls.__name__, places)(cls.__init__)  # type: ignore[method-assign]
        return cls

    return checking


def seeds_of(seed: Any) -> tuple[int, tuple[int, ...] | None]:
    """The seed of all that a rollout draws, and one for each slot if `seed` is a list of them, else None.

    None for a seed gives a fresh one. Of a list the one seed follows from all of them. Raises ValueError for what is
    no whole number, or is below 0, or for an empty list.
    """
    if seed is None:
        return fresh_seed(), None
    if not isinstance(seed, list | tuple | np.ndarray):
        check_numbers(seed=(seed, 0))
        return seed, None
    if not len(seed):
        raise ValueError("seed is an empty list, expected one whole number, or a list with one for each environment")
    for place, each in enumerate(seed):
        if not is_whole(each) or not 0 <= each <= _MOST_SEED:
            raise ValueError(f"seed[{place}] is {shown(each)}, expected a whole number from 0 to {_MOST_SEED}")
    seeds = tuple(int(each) for each in seed)
    return joint_seed(seeds), seeds
