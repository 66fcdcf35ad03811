"""An environment that numbers its own steps: nothing is lost, doubled or shifted without a number that does not fit.

Without torch, so that a worker process that steps it is there soon.
"""

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

NUM_ACTIONS = 7


class NumberedEnv(gym.Env[Any, Any]):
    """Observations are (slot, episode, step); the reward is the number of the step over the whole life.

    `log` holds every transition made: (episode, step, action, reward, terminated, truncated).
    """

    def __init__(self, slot: int, *, lengths: tuple[int, int] = (1, 12), nested: bool = False) -> None:
        self.slot = slot
        self.nested = nested
        number = gym.spaces.Box(0, 2**31, (3,), np.int64)
        self.observation_space = (
            gym.spaces.Dict({"at": number, "slot": gym.spaces.Discrete(1000)}) if nested else number
        )
        self.action_space = gym.spaces.Discrete(NUM_ACTIONS)
        self.lengths = lengths
        self.episode, self.step_number, self.life = -1, 0, 0
        self.log: list[tuple[int, int, int, float, bool, bool]] = []
        self.closed = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode += 1
        self.step_number = 0
        low, high = self.lengths
        self.length = int(self.np_random.integers(low, high + 1))
        self.truncates = bool(self.np_random.integers(2))
        return self._observation(), {"number": self._number()}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.step_number += 1
        self.life += 1
        done = self.step_number == self.length
        terminated, truncated = done and not self.truncates, done and self.truncates
        entry = (self.episode, self.step_number - 1, int(action), float(self.life), terminated, truncated)
        self.log.append(entry)
        return self._observation(), float(self.life), terminated, truncated, {"number": self._number()}

    def close(self) -> None:
        self.closed = True

    def _number(self) -> int:
        return 10_000 * self.episode + self.step_number

    def _observation(self) -> Any:
        at = np.array([self.slot, self.episode, self.step_number], np.int64)
        return {"at": at, "slot": self.slot} if self.nested else at


class WideEnv(NumberedEnv):
    """Observations of 32 KiB, of which the first three numbers are those of others; no log."""

    def __init__(self, slot: int, **kwargs: Any) -> None:
        super().__init__(slot, **kwargs)
        self.observation_space = gym.spaces.Box(0, 2**31, (4096,), np.int64)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        answer = super().step(action)
        self.log.clear()  # which would be all that grows
        return answer

    def _observation(self) -> Any:
        return np.pad(super()._observation(), (0, 4093))


class BreakingEnv(NumberedEnv):
    """Raises once it has made so many steps."""

    after = 0

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.life >= self.after:
            raise RuntimeError("it broke")
        return super().step(action)


def numbered_envs(count: int, **kwargs: Any) -> tuple[list[NumberedEnv], list[Callable[[], NumberedEnv]]]:
    """`count` environments, numbered as slots 0 … count - 1, and callables that hand them out."""
    envs = [NumberedEnv(slot, **kwargs) for slot in range(count)]
    return envs, [lambda env=env: env for env in envs]  # type: ignore[misc]
