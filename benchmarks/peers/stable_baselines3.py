"""Stable-Baselines3: `PPO.collect_rollouts` over `DummyVecEnv`, then one flat batch; it computes advantages as well."""

from typing import Any

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import CallbackList
from stable_baselines3.common.vec_env import DummyVecEnv


class Runner:
    """Collects a fragment at a time."""

    def __init__(self, make: Any, slots: int, fragment_length: int) -> None:
        self._envs = DummyVecEnv([make] * slots)
        self._length, self._slots = fragment_length, slots
        kwargs: Any = {"net_arch": [64, 64], "activation_fn": torch.nn.Tanh}
        self._ppo = PPO("MlpPolicy", self._envs, n_steps=fragment_length, policy_kwargs=kwargs, device="cpu")
        _, self._callback = self._ppo._setup_learn(10**9, CallbackList([]))

    def fragment(self) -> int:
        """One fragment and its batch; how many transitions it has."""
        ppo = self._ppo
        ppo.collect_rollouts(self._envs, self._callback, ppo.rollout_buffer, n_rollout_steps=self._length)
        next(iter(ppo.rollout_buffer.get(None)))
        return self._length * self._slots
