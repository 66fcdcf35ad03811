"""The environments that are measured with."""

import time
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv


class PixelEnv(gym.Env[Any, Any]):
    """Frames of 84×84×4 bytes, 50 µs of work a step, episodes of 150 to 250 steps."""

    metadata: dict[str, Any] = {}  # noqa: RUF012
    observation_space = gym.spaces.Box(0, 255, (84, 84, 4), np.uint8)
    action_space = gym.spaces.Discrete(18)
    _frames: Any = None

    def __init__(self, work_s: float = 50e-6) -> None:
        if PixelEnv._frames is None:
            PixelEnv._frames = np.random.default_rng(0).integers(0, 256, (64, 84, 84, 4), np.uint8)
        self._work_s, self._at, self._left = work_s, 0, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._left, self._at = int(self.np_random.integers(150, 251)), int(self.np_random.integers(64))
        return self._frames[self._at], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        end = time.perf_counter() + self._work_s
        self._at, self._left = (self._at + 1) % 64, self._left - 1
        while time.perf_counter() < end:
            pass
        return self._frames[self._at], 1.0, self._left <= 0, False, {}


class SleepEnv(gym.Env[Any, Any]):
    """Steps that take lognormal time, 5 ms in the mean (sigma 1), without the processor; episodes of 200 steps."""

    MEAN_S, SIGMA = 5e-3, 1.0
    metadata: dict[str, Any] = {}  # noqa: RUF012
    observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._left = 200
        return self.np_random.random(4, dtype=np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(self.np_random.lognormal(np.log(self.MEAN_S) - self.SIGMA**2 / 2, self.SIGMA))
        self._left -= 1
        return self.np_random.random(4, dtype=np.float32), 1.0, self._left <= 0, False, {}


class SleepPool(VectorEnv[Any, Any, Any]):
    """A pool in EnvPool's asynchronous form, whose steps take times as those of `SleepEnv`; no episode ever ends.

    means    seconds that the steps of each environment take, in the mean
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012
    single_observation_space, single_action_space = SleepEnv.observation_space, SleepEnv.action_space

    def __init__(self, means: Sequence[float], batch_size: int) -> None:
        self.num_envs, self._random = len(means), np.random.default_rng(0)
        self.config = {"num_envs": len(means), "batch_size": batch_size}
        self._size, self._logs = batch_size, np.log(means) - SleepEnv.SIGMA**2 / 2
        self._due = np.zeros(len(means))  # when each answer is ready; infinite: none is under way

    def async_reset(self) -> None:
        """Have all answers be ready."""

    def send(self, actions: Any, ids: Any) -> None:
        """Begin steps."""
        self._due[ids] = time.perf_counter() + self._random.lognormal(self._logs[ids], SleepEnv.SIGMA)

    def recv(self) -> tuple[Any, ...]:
        """Wait for the first answers."""
        ids = np.argpartition(self._due, self._size - 1)[: self._size]
        time.sleep(max(0.0, self._due[ids].max() - time.perf_counter()))
        self._due[ids] = np.inf
        seen = self._random.random((self._size, 4), dtype=np.float32)
        return seen, np.ones(self._size), *np.zeros((2, self._size), np.bool_), {"env_id": ids}


class NoopEnv(VectorEnv[Any, Any, Any]):
    """Gives the same arrays at every step; no episode ever ends."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, num_envs: int, observation_size: int = 4) -> None:
        self.num_envs = num_envs
        self.single_observation_space = gym.spaces.Box(-1, 1, (observation_size,), np.float32)
        self.single_action_space = gym.spaces.Discrete(2)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)
        self._answer: tuple[Any, ...] = (
            np.zeros((num_envs, observation_size), np.float32),
            np.zeros(num_envs, np.float64),
            np.zeros(num_envs, np.bool_),
            np.zeros(num_envs, np.bool_),
            {},
        )

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self._answer[0], {}

    def step(self, actions: Any) -> Any:
        return self._answer


gym.register(
    "PlainCartPole-v1", entry_point="gymnasium.envs.classic_control.cartpole:CartPoleEnv", max_episode_steps=500
)
PLAIN_CARTPOLE = "benchmarks.envs:PlainCartPole-v1"  # which nobody has vectorized


def plain_cartpole() -> gym.Env[Any, Any]:
    """One of them, for engines that want a callable."""
    return gym.make(PLAIN_CARTPOLE)


class CountingEnv(gym.Env[Any, Any]):
    """Four numbers, episodes of 200 steps, each of which takes so many seconds of work."""

    metadata: dict[str, Any] = {}  # noqa: RUF012
    observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, work_s: float = 0.0) -> None:
        self._work_s, self._left = work_s, 0
        self._observation = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self._left = 200
        return self._observation, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        end = time.perf_counter() + self._work_s
        while time.perf_counter() < end:
            pass
        self._left -= 1
        return self._observation, 1.0, self._left <= 0, False, {}
