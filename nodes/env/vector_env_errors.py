"""Errors about answers of environments that have no place in a vector environment's arrays: they name the slot."""

from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from numbers import Real
from traceback import walk_tb
from types import FrameType
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from numpy.typing import NDArray

from rollflow.stream.data.column import Column
from rollflow.stream.data.errors import ColumnError, EnvError, shown
from rollflow.stream.data.space import is_columnar, row_of
from rollflow.stream.data.tree import Tree

RESET_GIVES = ("observation", "info")
STEP_GIVES = ("observation", "reward", "terminated", "truncated", "info")
_SYNC_CODE = (SyncVectorEnv.reset.__code__, SyncVectorEnv.step.__code__)


def naming_slots(step: Callable[[Tree], Any], env: VectorEnv[Any, Any, Any]) -> Callable[[Tree], Any]:
    """Wrap the step function of environments: errors of a `SyncVectorEnv` name the slot."""
    if not isinstance(env.unwrapped, SyncVectorEnv):
        return step

    def named(actions: Tree) -> Any:
        try:
            return step(actions)
        except EnvError:
            raise
        except (AttributeError, TypeError, ValueError) as error:
            refuse_misfit(env, error)
            raise

    return named


def refuse_misfit(env: VectorEnv[Any, Any, Any], error: Exception) -> None:
    """Raise EnvError where `error` came from what one slot of a `SyncVectorEnv` gave; else do nothing.

    Called while `error` is being handled.
    """
    vector = env.unwrapped
    if not isinstance(vector, SyncVectorEnv):
        return
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    frame = next((each for each in reversed(frames) if each.f_code in _SYNC_CODE), None)
    if frame is not None and "i" in frame.f_locals:
        _refuse_answer(vector, frame, error, is_innermost=frame is frames[-1])
    observations: Sequence[Tree] = getattr(vector, "_env_obs", ())  # gymnasium keeps them nowhere else
    for slot, observation in enumerate(observations):
        text = None if observation is None else misfit_of(env.single_observation_space, observation)
        if text is not None:
            raise EnvError(f"slot {slot}: {text}") from error


def _refuse_answer(vector: Any, frame: FrameType, error: Exception, *, is_innermost: bool) -> None:
    """Raise EnvError where a slot's `step` or `reset` gave what gymnasium's loop over the slots could not take apart.

    frame           of that loop: `i` is the slot, `env_info` the last info
    is_innermost    whether the loop itself raised, and nothing that it called
    """
    slot = frame.f_locals["i"]
    is_reset = frame.f_code is SyncVectorEnv.reset.__code__
    if vector.autoreset_mode is AutoresetMode.NEXT_STEP:
        is_reset |= bool(vector._autoreset_envs[slot])
    elif vector.autoreset_mode is AutoresetMode.SAME_STEP:
        is_reset |= bool(vector._terminations[slot] or vector._truncations[slot])
    method, gives = ("reset", RESET_GIVES) if is_reset else ("step", STEP_GIVES)
    info = frame.f_locals.get("env_info", {})
    if not isinstance(info, Mapping):
        raise EnvError(
            f"slot {slot}: the info that {method} gave is {shown(info)}, expected a dict: {method} must return a tuple "
            f"({', '.join(gives)})"
        ) from error
    if not is_innermost:
        return
    if not is_reset:
        raise EnvError(
            f"slot {slot}: step gave what is no {', '.join(STEP_GIVES)}: {error}; expected a reward that is one "
            "number, and terminated and truncated that are one bool each"
        ) from error
    if "unpack" in str(error):
        raise EnvError(f"slot {slot}: reset gave what is no tuple (observation, info): {error}") from error


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
