"""A pool in EnvPool's asynchronous form over plain environments, whose answers come in a drawn order."""

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from rollflow.stream.data.tree import stack_trees


class StandInPool(VectorEnv[Any, Any, Any]):
    """Steps an environment where its action is sent, and answers for any `batch_size` of those under way.

    odds    how much oftener than the one before it each environment is answered for; 1: all alike
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, envs: Sequence[gym.Env[Any, Any]], batch_size: int, seed: int = 0, odds: float = 1.0) -> None:
        self.envs, self.num_envs = envs, len(envs)
        self.single_observation_space, self.single_action_space = envs[0].observation_space, envs[0].action_space
        self.config = {"num_envs": self.num_envs, "batch_size": batch_size}
        self.under_way: dict[int, tuple[Any, ...]] = {}
        self._ended: set[int] = set()
        self._random, self._odds = np.random.default_rng(seed), odds

    def async_reset(self) -> None:
        for number, env in enumerate(self.envs):
            observation, info = env.reset(seed=number)
            self.under_way[number] = observation, 0.0, False, False, info

    def send(self, actions: Any, ids: Any) -> None:
        for number, action in zip(ids.tolist(), actions, strict=True):
            assert number not in self.under_way
            env = self.envs[number]
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
        waiting = list(self.under_way)
        assert len(waiting) >= self.config["batch_size"], "it would wait for ever"
        weights = np.power(self._odds, waiting, dtype=np.float64)
        chosen = self._random.choice(waiting, self.config["batch_size"], replace=False, p=weights / weights.sum())
        answers = [self.under_way.pop(int(number)) for number in chosen]
        observations, rewards, terminateds, truncateds, infos = zip(*answers, strict=True)
        info = {"env_id": chosen.astype(np.int32), "elapsed_step": np.zeros(len(chosen), np.int32)}
        info["number"] = np.array([each["number"] for each in infos])
        flags = np.array(terminateds), np.array(truncateds)
        return stack_trees(observations), np.array(rewards, np.float32), *flags, info
