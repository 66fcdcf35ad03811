"""Checks of plain arguments: numbers, seconds, True or False, seeds."""

import math
from typing import Any

import numpy as np

from rollflow.stream.graph.seeding import fresh_seed, joint_seed

_MOST_SEED = 2**63 - 1
_SECONDS = ("max_wait", "step_timeout", "reset_timeout", "join_timeout", "linger", "retry_s")


def is_whole(number: Any) -> bool:
    """True for a whole number, Python's or numpy's, but no bool."""
    return type(number) is int or (isinstance(number, int | np.integer) and not isinstance(number, bool))


def check_numbers(**numbers: tuple[float | None, int]) -> None:
    """Raise ValueError for a number that is not whole, or below the least allowed; None is let pass.

    numbers    name -> (number, least). Names of seconds may be fractions
    """
    for name, (number, least) in numbers.items():
        if number is None:
            continue
        if not is_whole(number) and not (name in _SECONDS and isinstance(number, float) and math.isfinite(number)):
            raise ValueError(f"{name} is {number!r}, expected {'seconds' if name in _SECONDS else 'a whole number'}")
        if number < least:
            raise ValueError(f"{name} is {number}, expected at least {least}")


def check_flags(**flags: Any) -> None:
    """Raise ValueError for a value, by name, that is neither True nor False."""
    for name, flag in flags.items():
        if not isinstance(flag, bool | np.bool_):
            raise ValueError(f"{name} is {flag!r}, expected True or False")


def seeds_of(seed: Any) -> tuple[int, tuple[int, ...] | None]:
    """The seed of all that a rollout draws, and one for each slot where `seed` is a list of them, else None.

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
            raise ValueError(f"seed[{place}] is {each!r}, expected a whole number from 0 to {_MOST_SEED}")
    seeds = tuple(int(each) for each in seed)
    return joint_seed(seeds), seeds
