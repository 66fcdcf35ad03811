"""Environments whose values lie at the ends of their types, and the episodes that direct stepping makes of them.

Without torch, so that a worker process that steps them is there soon.
"""

import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray
from small_env import SmallEnv

from rollflow.stream.data.tree import leaves_of, map_tree

OBSERVATION_DTYPES = ("u1", "u2", "i4", "i8", "f2", "f4", "f8", "?")
ACTION_SPACES: dict[str, gym.Space[Any]] = {
    "discrete": gym.spaces.Discrete(3, start=-1),
    "multi": gym.spaces.MultiDiscrete([3, 200]),
    "u1": gym.spaces.Box(0, 255, (2,), np.uint8),
    "i2": gym.spaces.Box(-(2**15), 2**15 - 1, (2,), np.int16),
    "i8": gym.spaces.Box(-(2**63), 2**63 - 1, (2,), np.int64),
    "f4": gym.spaces.Box(-1, 1, (2,), np.float32),
    "f8": gym.spaces.Box(-1, 1, (2,), np.float64),
    "tuple": gym.spaces.Tuple((gym.spaces.Discrete(3), gym.spaces.Box(-1, 1, (1,), np.float32))),
    "dict": gym.spaces.Dict({"push": gym.spaces.Box(0, 255, (1,), np.uint8), "turn": gym.spaces.Discrete(2)}),
}
REWARDS = (0.0, 0.1, 1 / 3, -3e38, 1e-45, 16_777_217.0)


class Form(NamedTuple):
    """Types and lengths of an environment.

    dtype     of observations, as numpy's character code
    nested    whether observations are a Dict of two leaves, the second u2
    action    name of the action space
    longest   number of steps of the longest episode
    """

    dtype: str
    nested: bool
    action: str
    longest: int

    @property
    def observation_space(self) -> gym.Space[Any]:
        """The space of observations."""
        ends = ends_of(self.dtype)
        # As arrays: Box takes no scalar bool.
        box = gym.spaces.Box(np.full(3, ends.min()), np.full(3, ends.max()), dtype=ends.dtype.type)
        depth = gym.spaces.Box(0, 2**16 - 1, (2, 1), np.uint16)
        return gym.spaces.Dict({"depth": depth, "value": box}) if self.nested else box


def ends_of(dtype: str) -> NDArray[Any]:
    """Numbers at the ends of a type, and others that a narrower type has not."""
    kind = np.dtype(dtype)
    if kind.kind == "b":
        return np.array([False, True])
    if kind.kind == "f":
        info = np.finfo(kind)
        return np.array([info.min, info.max, info.tiny, -0.0, 0.1, 1 / 3, 3000.5], kind)
    bounds = np.iinfo(kind)
    return np.array([bounds.min, bounds.max, bounds.max - 1, 0, 1, bounds.max // 3], kind)


def checksum(tree: Any) -> int:
    """A number that follows from each bit and type of a tree of arrays."""
    code = 0
    for leaf in leaves_of(tree):
        array = np.ascontiguousarray(leaf)
        code = zlib.crc32(array.tobytes(), zlib.crc32(array.dtype.str.encode(), code))
    return code


def action_for(space: gym.Space[Any], observation: Any) -> Any:
    """The action that the policy takes, in the space's own types: often one at the ends of the space."""
    return _action(space, np.random.default_rng(checksum(observation)))


def _action(space: Any, generator: np.random.Generator) -> Any:
    if isinstance(space, gym.spaces.Tuple):
        return tuple(_action(part, generator) for part in space.spaces)
    if isinstance(space, gym.spaces.Dict):
        return {name: _action(part, generator) for name, part in space.spaces.items()}
    if isinstance(space, gym.spaces.Discrete):
        return np.int64(space.start + generator.integers(space.n))
    if isinstance(space, gym.spaces.MultiDiscrete):
        return generator.integers(space.nvec).astype(space.dtype)
    if space.dtype.kind == "f":
        table = np.array([-1.0, 1.0, 0.1, 1 / 3, -1e-30], space.dtype)
    else:
        bounds = np.iinfo(space.dtype)
        table = np.array([bounds.min, bounds.max, bounds.max - 1, 0, 77], space.dtype)
    return generator.choice(table, size=space.shape)


class TypedEnv(gym.Env[Any, Any]):
    """Observations and rewards at the ends of their types, which follow from slot, episode and step.

    Infos say slot, episode and step, the checksum of the action that came before, and whether the space has it.
    """

    def __init__(self, slot: int, form: Form) -> None:
        self.observation_space, self.action_space = form.observation_space, ACTION_SPACES[form.action]
        self._slot, self._form, self._episode = slot, form, -1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._episode += 1
        self._step = 0
        chance = np.random.default_rng([self._slot, self._episode])
        self._length, self._terminates = int(chance.integers(1, self._form.longest + 1)), bool(chance.integers(2))
        return self._observation(), self._infos()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._step += 1
        ends = self._step == self._length
        told = {"got": checksum(action), "contained": bool(self.action_space.contains(action))}
        flags = ends and self._terminates, ends and not self._terminates
        reward = REWARDS[checksum(action) % len(REWARDS)]
        return self._observation(), reward, *flags, {**self._infos(), **told}

    def _observation(self) -> Any:
        chance = np.random.default_rng([self._slot, self._episode, self._step, 1])
        value = chance.choice(ends_of(self._form.dtype), size=3)
        if not self._form.nested:
            return value
        return {"depth": chance.choice(ends_of("u2"), size=(2, 1)), "value": value}

    def _infos(self) -> dict[str, Any]:
        return {"slot": self._slot, "episode": self._episode, "step": self._step}


class MaskedEnv(SmallEnv):
    """Says in its observations which of four actions are ruled out in a step, and slot, episode and step."""

    observation_space = gym.spaces.Dict(
        {"action_mask": gym.spaces.MultiBinary(4), "at": gym.spaces.Box(0, 2**31 - 1, (3,), np.int32)}
    )
    action_space = gym.spaces.Discrete(4)
    truncates = True

    def __init__(self, slot: int, longest: int) -> None:
        self._slot, self._longest, self._episode = slot, longest, -1

    def look(self) -> Any:
        if not self.t:
            self._episode += 1
            self.length = int(np.random.default_rng([self._slot, self._episode]).integers(1, self._longest + 1))
        at = np.array([self._slot, self._episode, self.t], np.int32)
        return {"action_mask": mask_at(at), "at": at}


def mask_at(at: NDArray[np.int32]) -> NDArray[np.int8]:
    """The mask i8[4] of a `MaskedEnv` at (slot, episode, step); one action at least is allowed."""
    chance = np.random.default_rng(at.tolist())
    mask = chance.integers(0, 2, 4).astype(np.int8)
    mask[chance.integers(4)] = 1
    return mask


class Episode(NamedTuple):
    """One episode as direct stepping makes it."""

    observations: list[Any]  # one more than there are actions, as the last piece leaves them
    actions: list[Any]
    rewards: list[float]
    ends: tuple[bool, bool]  # (terminated, truncated) after the last action
    infos: list[dict[str, Any]]


def stepped_directly(env: TypedEnv, turned: Callable[[Any], Any], episodes: int) -> list[Episode]:
    """So many whole episodes of an environment, in order.

    turned    what the connector pieces make of an observation
    """
    played = []
    for _ in range(episodes):
        observation, info = env.reset()
        episode = Episode([turned(observation)], [], [], (False, False), [info])
        while not any(episode.ends):
            action = action_for(env.action_space, episode.observations[-1])
            observation, reward, terminated, truncated, info = env.step(action)
            episode.observations.append(turned(observation))
            episode.actions.append(action)
            episode.rewards.append(reward)
            episode.infos.append(info)
            episode = episode._replace(ends=(terminated, truncated))
        played.append(episode)
    return played


def folded(observation: Any, dtype: str) -> Any:
    """Each leaf as numbers of one byte that follow from all of its bits, in another type: any[...] -> dtype[...]."""

    def fold(leaf: Any) -> NDArray[Any]:
        array = np.ascontiguousarray(leaf)
        octets = array[..., None].view(np.uint8).reshape(*array.shape, array.itemsize)
        return np.asarray(np.bitwise_xor.reduce(octets + np.arange(array.itemsize, dtype=np.uint8), -1)).astype(dtype)

    return map_tree(fold, observation)
