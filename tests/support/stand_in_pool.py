"""A pool in EnvPool's asynchronous form over plain environments, whose answers come in a drawn order."""

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from rollflow.stream.data.tree import stack_trees


class StandInPool(VectorEnv[Any, Any, Any]):
    """Steps an environment where its action is sent, and answers for any `batch_size` of those under way.

    odds     how much oftener than the one before it each environment is answered for; 1: all alike
    lasts    seconds that a step of each environment lasts, on average: the first that are ready are answered for

    clock    seconds that have gone by
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(
        self,
        envs: Sequence[gym.Env[Any, Any]],
        batch_size: int,
        seed: int = 0,
        odds: float = 1.0,
        lasts: Sequence[float] | None = None,
    ) -> None:
        self.envs, self.num_envs = envs, len(envs)
        self.single_observation_space, self.single_action_space = envs[0].observation_space, envs[0].action_space
        self.config = {"num_envs": self.num_envs, "batch_size": batch_size}
        self.under_way: dict[int, tuple[Any, ...]] = {}
        self._ended: set[int] = set()
        self._random, self._odds, self._lasts = np.random.default_rng(seed), odds, lasts
        self._due, self.clock = np.zeros(self.num_envs), 0.0

    def async_reset(self) -> None:
        for number, env in enumerate(self.envs):
            observation, info = env.reset(seed=number)
            self.under_way[number] = observation, 0.0, False, False, info

    def send(self, actions: Any, ids: Any) -> None:
        for number, action in zip(ids.tolist(), actions, strict=True):
            assert number not in self.under_way
            env = self.envs[number]
            if self._lasts is not None:
                self._due[number] = self.clock + self._lasts[number] * self._random.uniform(0.5, 1.5)
            if number in self._ended:
                self._ended.remove(number)
                observation, info = env.reset()
                answer = observation, 0.0, False, False, info
            else:
                answer = env.step(action)
                if answer[2] or answer[3]:
                    self._ended.add(number)
            self.under_way[number] = answer

    def recv(self) -> tuple[Any, ...]:
        waiting, size = np.array(list(self.under_way)), self.config["batch_size"]
        assert len(waiting) >= size, "it would wait for ever"
        if self._lasts is None:
            weights = np.power(self._odds, waiting, dtype=np.float64)
            chosen = self._random.choice(waiting, size, replace=False, p=weights / weights.sum())
        else:
            chosen = waiting[np.argsort(self._due[waiting], kind="stable")[:size]]
            self.clock = max(self.clock, float(self._due[chosen[-1]]))
        answers = [self.under_way.pop(int(number)) for number in chosen]
        observations, rewards, terminateds, truncateds, infos = zip(*answers, strict=True)
        info = {"env_id": chosen.astype(np.int32), "elapsed_step": np.zeros(len(chosen), np.int32)}
        info["number"] = np.array([each["number"] for each in infos])
        flags = np.array(terminateds), np.array(truncateds)
        return stack_trees(observations), np.array(rewards, np.float32), *flags, info
