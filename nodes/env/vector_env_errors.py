"""Errors about answers of environments that have no place in a vector environment's arrays: they name the slot."""

from collections.abc import Mapping, Sequence
from decimal import Decimal
from numbers import Real
from typing import Any

import numpy as np
from gymnasium.vector import SyncVectorEnv, VectorEnv
from numpy.typing import NDArray

from rollflow.stream.data.column import Column
from rollflow.stream.data.errors import ColumnError, EnvError, shown
from rollflow.stream.data.space import is_columnar, row_of
from rollflow.stream.data.tree import Tree

STEP_GIVES = ("observation", "reward", "terminated", "truncated", "info")


def refuse_misfit(env: VectorEnv[Any, Any, Any], error: Exception) -> None:
    """Raise EnvError where `error` came from an observation that a slot of a `SyncVectorEnv` gave; else do nothing."""
    if not isinstance(env.unwrapped, SyncVectorEnv):
        return
    observations: Sequence[Tree] = getattr(env.unwrapped, "_env_obs", ())  # gymnasium keeps them nowhere else
    for slot, observation in enumerate(observations):
        text = None if observation is None else misfit_of(env.single_observation_space, observation)
        if text is not None:
            raise EnvError(f"slot {slot}: {text}") from error


def check_reset(answer: Any, where: Any, expected: str = "a tuple (observation, info)") -> None:
    """Raise EnvError for anything but a pair; an array of two rows is none, though it unpacks into two."""
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise EnvError(f"{where}: reset gave {kind_of(answer)}, expected {expected}").see("flags")


def info_given(info: Any, where: str) -> Mapping[str, Any]:
    """The info of one step; an empty one for None. Raises EnvError for anything that is no dict."""
    if info is None:
        return {}
    if not isinstance(info, Mapping):
        raise EnvError(f"{where}: info is {kind_of(info)}, expected a dict").see("flags")
    return info


def kind_of(value: Any) -> str:
    """The kind of a value, for errors: its class and size, or its dtype and shape."""
    if isinstance(value, np.ndarray):
        return f"an array {value.dtype}{list(value.shape)}"
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, Sequence) else "")


def misfit_of(space: Any, observation: Tree) -> str | None:
    """The reason why an observation `any[...]` has no place in a column of its space; None where it has one."""
    if not is_columnar(space):
        return None
    try:
        Column.empty("obs", row_of(space, 1), 1).write_slot(0, 0, observation)
    except (ColumnError, ValueError) as error:
        return f"an observation that is not in its space: {error}"
    return None


def rewards_of(rewards: Sequence[Any]) -> NDArray[Any]:
    """The rewards of all slots as an array number[N]. Raises EnvError, with the slot, where one is no number."""
    try:
        array = np.array(rewards)
        if array.ndim == 1 and array.dtype.kind in "fiub":
            return array
    except (TypeError, ValueError, RuntimeError):  # of different shapes, or tensors of some devices
        pass
    values = [number_of(reward) for reward in rewards]
    if None in values:
        slot = values.index(None)
        raise EnvError(f"slot {slot}: its reward is {shown(rewards[slot])}, expected one number").see("flags")
    return np.array(values, np.float64)


def number_of(value: Any) -> float | None:
    """The real number that a value is, as a float; None if it is none.

    Numbers are Python's, with Decimal and Fraction, numpy's, and arrays and tensors with one element.
    """
    try:
        if isinstance(value, Real | Decimal):
            return float(value)
        array = np.asarray(value if hasattr(value, "__array__") else None)
        return float(array.item()) if array.size == 1 and array.dtype.kind in "fiub" else None
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
