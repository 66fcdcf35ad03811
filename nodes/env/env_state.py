"""The state of an environment: read, so that another of the same kind goes on from it to the bit.

An environment is read layer by layer, its wrappers first. A layer with `get_state()` and `set_state(state)` says its
own. Layers of packages that keep all of their state in attributes are read from these. What lies elsewhere is read by
means of its own: the memory of a MuJoCo simulation, and an Atari emulator with its generator, but for the last action
that it may repeat. An environment that can't be read is stepped again, from its last reset on.
"""

import copy
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from numpy.typing import NDArray

from rollflow.stream.data.errors import EnvError, noted, shown
from rollflow.stream.data.tree import leaves_of, library_of, map_tree

# Packages whose environments and wrappers have no state but in attributes, and in what is named below.
_PACKAGES = frozenset({"gymnasium", "ale_py", "minatar", "pettingzoo", "mpe2", "rollflow"})
_NO_STATE = gym.Space, EnvSpec, np.dtype, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, partial
_OF_DRAWING = "screen", "clock", "surf", "window", "mujoco_renderer"
_AS_MADE = (
    "_saved_kwargs",
    "_ezpickle_args",
    "_ezpickle_kwargs",
    "env_fns",
    "model",
    "ale",
    "P",
    "desc",
)  # as arguments say
_NO_STATE_NAMES = frozenset({*_OF_DRAWING, *_AS_MADE})
_DRAWN = "Surface", "Clock", "Font"  # of pygame: what a step draws anew
_SEQUENCES = {"list": list, "tuple": tuple, "deque": deque, "set": set}
_START = "episode_start_time"  # of `RecordEpisodeStatistics`, by the clock of a process
_LARGE = "rollflow.int"
MOST_ACTIONS = 1 << 20  # that are kept of an episode
_SAME, _KEPT = "same", "kept"  # as a thing that was read before; as it was made


def state_of(env: Any) -> dict[str, Any]:
    """The state of an environment: plain values and arrays, in lists, tuples and dicts, all of them copies.

    Raises EnvError, which names the part, for an environment with state that can't be read.
    """
    return _Reader().object(env, type(env).__name__)


def set_state(env: Any, state: Mapping[str, Any]) -> None:
    """Have an environment go on from a state that `state_of` read of another, made with the same arguments.

    It has been reset before: what the first reset makes is there. Raises EnvError for the state of another kind.
    """
    _Writer().object(env, state, type(env).__name__)


def states_of(envs: Sequence[Any]) -> list[dict[str, Any]]:
    """Of each environment {"state": …}, {"replay": …} or {"restart": why}; see `state_of` and `RecordedEnv`."""
    told = []
    for slot, env in enumerate(envs):
        with noted(f"slot {slot}, while its state was read"):
            told.append(_told_by(env))
    return told


def check_states(states: Sequence[Mapping[str, Any]], count: int) -> None:
    """Raise EnvError if so many environments can't go on from what `states_of` gave."""
    if len(states) != count:
        raise EnvError(f"the states are of {len(states)} environments, and there are {count}")
    if (why := next((each["restart"] for each in states if "restart" in each), None)) is not None:
        raise EnvError(why)


def restored(env: Any, state: Mapping[str, Any], slot: int) -> Any:
    """The environment of a slot that has been reset, and goes on from its part of what `states_of` gave.

    It is the environment, or it recorded.
    """
    if "replay" not in state:
        with noted(f"slot {slot}, while it was given its state"):
            set_state(env, state["state"])
        return env
    made = env if isinstance(env, RecordedEnv) else RecordedEnv(env)
    with noted(f"slot {slot}, while its recorded actions were stepped again"):
        made.set_state(state["replay"])
    return made


def recorded(envs: Sequence[Any]) -> list[Any]:
    """The environments, with their steps recorded from the next reset on."""
    return [env if isinstance(env, RecordedEnv) else RecordedEnv(env) for env in envs]


def recorded_as_needed(envs: Sequence[Any]) -> list[Any]:
    """The environments, once they have been reset: those whose state can be read are not recorded any more."""
    return [env.env if isinstance(env, RecordedEnv) and "state" in _told_by(env.env) else env for env in envs]


def _told_by(env: Any) -> dict[str, Any]:
    try:
        return {"replay": env.get_state()} if isinstance(env, RecordedEnv) else {"state": state_of(env)}
    except EnvError as error:
        return {"restart": str(error)}


class RecordedEnv:
    """The steps of an environment since its last reset, by which another one comes to the same.

    That holds for an environment that draws from its `np_random` alone, and for an Atari emulator. What the last step
    gives there, but for infos, is compared with what it gave here.

    env            the environment
    reset, step    to be called in place of its own
    """

    def __init__(self, env: Any) -> None:
        self.env, self.unwrapped = env, getattr(env, "unwrapped", env)
        self._began: dict[str, Any] = {}  # what the last reset drew from, and what it began with
        self._actions: list[Any] = []
        self._newest: Any = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Reset it, and record from here on."""
        drawn = None if (random := self._random) is None else _as_text(_bits(random).state)
        answer = self.env.reset(seed=seed, options=options)
        emulated = _emulated(self.unwrapped) if hasattr(self.unwrapped, "clone_state") else None
        self._began = {"drawn": drawn, "seed": seed, "emulated": emulated}
        self._actions, self._newest = [], map_tree(_copied, answer[:1])
        return answer

    def step(self, action: Any) -> Any:
        """Step it, and record the action."""
        if len(self._actions) <= MOST_ACTIONS:
            self._actions.append(map_tree(_copied, action))
        answer = self.env.step(action)
        self._newest = map_tree(_copied, answer[:4])
        return answer

    def get_state(self) -> dict[str, Any]:
        """What `set_state` of another one needs. Raises EnvError for an episode that is too long."""
        if len(self._actions) > MOST_ACTIONS:
            raise EnvError(f"{self.env}: the episode has more than {MOST_ACTIONS:,} steps: too many to be made again")
        return {**self._began, "actions": list(self._actions), "newest": self._newest}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Reset the environment and step it as the other was. Raises EnvError if it does not come to the same."""
        if (random := self._random) is not None and state["drawn"] is not None:
            _bits(random).state = _from_text(state["drawn"])
        self.reset(seed=state["seed"])
        if state["emulated"] is not None:
            _set_emulated(self.unwrapped, state["emulated"])
        self._began = {name: state[name] for name in self._began}
        for action in state["actions"]:
            self.step(action)
        if not all(map(_is_same, leaves_of(self._newest), leaves_of(state["newest"]))):
            raise EnvError(
                f"{self.env}: the same actions from the same seed give another observation or reward after "
                f"{len(state['actions'])} steps; expected an environment that draws from self.np_random alone, or one "
                "with get_state() and set_state(state)"
            ).see("state of environments")

    @property
    def _random(self) -> Any:
        """The environment's generator; None: it has none, or not before its first reset."""
        random = getattr(self.unwrapped, "np_random", None)
        return random if isinstance(random, np.random.Generator | np.random.RandomState) else None


def _class_of(owner: Any) -> str:
    return f"{type(owner).__module__}.{type(owner).__qualname__}"


def _bits(generator: Any) -> Any:
    """What makes the random bits of a generator."""
    return generator.bit_generator if isinstance(generator, np.random.Generator) else generator._bit_generator


def _as_text(state: Any) -> Any:
    """The state of random bits with its integers as text: they may have 128 bits."""
    if isinstance(state, dict):
        return {name: _as_text(value) for name, value in state.items()}
    return str(state) if isinstance(state, int) else state


def _from_text(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _from_text(value) for name, value in state.items()}
    return int(state) if isinstance(state, str) and state.isdigit() else state


def _simulated(data: Any) -> Iterator[tuple[str, NDArray[Any]]]:
    """The arrays of a MuJoCo simulation, by name: its inputs, and what the last step has worked out from them."""
    for name in dir(data):
        value = None if name.startswith("_") else getattr(data, name)
        if isinstance(value, np.ndarray) and value.size:
            yield name, value


def _emulated(env: Any) -> NDArray[np.uint8]:
    """The state of an Atari emulator and its generator, without the last action."""
    return np.frombuffer(env.clone_state(include_rng=True).__getstate__(), np.uint8)


def _set_emulated(env: Any, data: NDArray[np.uint8]) -> None:
    kind: Any = type(env.clone_state())
    emulated = kind.__new__(kind)
    emulated.__setstate__(data.tobytes())
    env.restore_state(emulated)


def _is_same(one: Any, other: Any) -> bool:
    """True for equal numbers, arrays and text; NaN is the same as NaN."""
    is_float = np.asarray(one).dtype.kind in "fc"
    return np.array_equal(one, other, equal_nan=is_float)


def _own_of(value: Any, where: str) -> Any:
    """A copy of what an environment says of itself; integers that no message can have are text.

    Raises EnvError, which names the part, for what no file can have.
    """
    if isinstance(value, dict):
        return {key: _own_of(each, f"{where}[{key!r}]") for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_own_of(each, f"{where}[{place}]") for place, each in enumerate(value))
    is_plain = library_of(value) is not np or (isinstance(value, np.ndarray) and not value.dtype.hasobject)
    if not (is_plain or value is None or isinstance(value, bool | int | float | str | np.generic)):
        raise EnvError(
            f"{where} is {type(value).__name__} {shown(value)}, which can't be saved; expected numbers, text, arrays, "
            "and lists, tuples and dicts of them"
        ).see("state of environments")
    return {_LARGE: str(value)} if _is_large(value) else _copied(value)


def _is_large(value: Any) -> bool:
    return type(value) is int and not -(2**63) <= value < 2**63


def _own_from(value: Any) -> Any:
    if isinstance(value, dict):
        return int(value[_LARGE]) if _LARGE in value else {key: _own_from(each) for key, each in value.items()}
    return type(value)(map(_own_from, value)) if isinstance(value, list | tuple) else value


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value


class _Reader:
    """Reads the state of one environment. What comes twice is read once, and named by its number the second time."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}  # by id

    def object(self, owner: Any, where: str) -> dict[str, Any]:
        """The state of an environment, a wrapper, or an object that belongs to one."""
        self._numbers[id(owner)] = len(self._numbers)
        state: dict[str, Any] = {"class": _class_of(owner)}
        if all(callable(getattr(type(owner), name, None)) for name in ("get_state", "set_state")):
            inner = {"env": self.value(owner.env, f"{where}.env")} if isinstance(owner, gym.Wrapper) else {}
            for name in ("_np_random", "np_random"):  # of gymnasium, and of PettingZoo
                if isinstance(drawn := vars(owner).get(name), np.random.Generator | np.random.RandomState):
                    inner[name] = {"generator": _as_text(_bits(drawn).state)}
            return state | {"own": _own_of(owner.get_state(), f"{where}.get_state()"), "values": inner}
        if type(owner).__module__.partition(".")[0] not in _PACKAGES:
            raise self._unreadable(where, type(owner).__qualname__)
        if hasattr(owner, "clone_state"):
            if owner.ale.getFloat("repeat_action_probability"):
                raise EnvError(f"{where}: an emulator that may repeat the action before does not say which it was")
            state["ale"] = _emulated(owner)
        named = {name: value for name, value in vars(owner).items() if name not in _NO_STATE_NAMES}
        state["values"] = {name: self.value(value, f"{where}.{name}") for name, value in named.items()}
        if _START in named:
            state["values"][_START] = time.perf_counter() - named[_START]
        return state

    def value(self, value: Any, where: str) -> Any:
        """The value of an attribute, or of a part of one: as it is, or {its kind: …}."""
        if _is_large(value):
            return {_LARGE: str(value)}
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, str):
            return str(value)
        of_pygame = type(value).__name__ if type(value).__module__.partition(".")[0] == "pygame" else ""
        if isinstance(value, _NO_STATE) or of_pygame in _DRAWN:
            return {_KEPT: None}
        if of_pygame == "Rect":
            return {"rect": list(value)}
        if isinstance(value, np.generic):
            return value.copy()
        if (known := self._numbers.get(id(value))) is not None:
            return {_SAME: known}
        if hasattr(value, "__dict__") and not isinstance(value, (dict, *_SEQUENCES.values())):
            return {"object": self.object(value, where)}
        self._numbers[id(value)] = len(self._numbers)
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return value.copy()
        if isinstance(value, np.random.Generator | np.random.RandomState):
            return {"generator": _as_text(_bits(value).state)}
        if "mujoco" in sys.modules and isinstance(value, sys.modules["mujoco"].MjData):
            return {"mujoco": {name: array.copy() for name, array in _simulated(value)}, "time": value.time}
        if type(value) is dict:
            pairs = value.items()
            return {"dict": [[self.value(each, f"{where}[{key!r}]") for each in (key, of)] for key, of in pairs]}
        for kind, cls in _SEQUENCES.items():
            if type(value) is cls:
                return {kind: [self.value(each, f"{where}[{place}]") for place, each in enumerate(value)]}
        raise self._unreadable(where, f"{type(value).__name__} {shown(value)}")

    def _unreadable(self, where: str, what: str) -> EnvError:
        return EnvError(
            f"{where}: the state of a {what} can't be read; expected it to have get_state() and set_state(state)"
        ).see("state of environments")


class _Writer:
    """Writes a state into one environment, in the order in which it was read."""

    def __init__(self) -> None:
        self._made: list[Any] = []  # by its number
        self._given: set[int] = set()  # ids of what has its state

    def object(self, owner: Any, state: Mapping[str, Any], where: str) -> None:
        """Give an environment, a wrapper, or an object that belongs to one, its state."""
        self._made.append(owner)
        self._given.add(id(owner))
        if state["class"] != _class_of(owner):
            raise EnvError(f"{where} is a {_class_of(owner)}, expected a {state['class']}: the state is of one")
        if "ale" in state:
            _set_emulated(owner, state["ale"])
        now = vars(owner)
        for name, value in state["values"].items():
            now[name] = self.value(now.get(name), value, f"{where}.{name}")
        if _START in state["values"]:
            now[_START] = time.perf_counter() - now[_START]
        if "own" in state:
            owner.set_state(_own_from(state["own"]))

    def value(self, now: Any, state: Any, where: str) -> Any:
        """The value of an attribute, or of a part of one. What is no value keeps its place, and is given the state."""
        if isinstance(state, np.ndarray) and state.ndim:
            self._made.append(state.copy())
            return self._made[-1]
        if not isinstance(state, dict):
            return state
        kind, of = next(iter(state.items()))
        if kind == _KEPT:
            return now
        if kind == _LARGE:
            return int(of)
        if kind == _SAME:
            return self._made[of]
        if kind == "object":
            if id(now) in self._given:  # in another environment it stands for two, which here are one
                now = copy.copy(now)
            self.object(now, of, where)
            return now
        if kind == "rect":
            return sys.modules["pygame"].Rect(of)
        if kind == "generator" and (now is None or id(now) in self._given):
            now = np.random.Generator(np.random.PCG64())
        number = len(self._made)
        self._made.append(now)
        if kind == "generator":
            self._given.add(id(now))
            _bits(now).state = _from_text(of)
        elif kind == "mujoco":
            for name, array in of.items():
                if (there := getattr(now, name)).shape == array.shape:  # not one of contacts, which are found anew
                    there[...] = array
            now.time = state["time"]
        else:
            now = self._made[number] = self._container(now, kind, of, where)
        return now

    def _container(self, now: Any, kind: str, of: Sequence[Any], where: str) -> Any:
        if kind == "dict":
            before, made = now if type(now) is dict else {}, {}
            for pair in of:
                key = self.value(None, pair[0], where)
                made[key] = self.value(before.get(key), pair[1], f"{where}[{key!r}]")
            return made
        each = list(now) if type(now) is _SEQUENCES[kind] and len(now) == len(of) else [None] * len(of)
        parts = [self.value(*pair, f"{where}[{place}]") for place, pair in enumerate(zip(each, of, strict=True))]
        return deque(parts, getattr(now, "maxlen", None)) if kind == "deque" else _SEQUENCES[kind](parts)
