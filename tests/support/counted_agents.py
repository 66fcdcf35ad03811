"""Environments with several agents that are vectorized, and count."""

from typing import Any

import gymnasium as gym
import numpy as np

from rollflow.nodes import ArrayStep, MultiAgentVectorEnv

AGENTS = ("a", "b", "c")


class Counted(MultiAgentVectorEnv):
    """Agents see (number, env, place, step); environment i ends after each `3 + i`-th step, and infos tell the step.

    Episodes of every second environment are truncated, the others terminate.
    """

    def __init__(self, number: int, num_envs: int = 2) -> None:
        self.number, self.num_envs, self.possible_agents = number, num_envs, AGENTS
        self.observation_spaces = dict.fromkeys(AGENTS, gym.spaces.Box(0, 1000, (4,), np.int64))
        self.action_spaces = dict.fromkeys(AGENTS, gym.spaces.Discrete(4))
        self.is_closed = False

    def reset_arrays(self, seeds: Any) -> Any:
        self.steps = np.zeros(self.num_envs, np.int64)
        return [self._seen()], [{"a": {"seed": seeds[env]}} for env in range(self.num_envs)]

    def step_arrays(self, actions: Any) -> ArrayStep:
        self.steps += 1
        seen, envs = self._seen(), np.arange(self.num_envs)
        done = self.steps == envs + 3
        infos = [{"b": {"step": int(step)}} for step in self.steps]
        self.steps[done] = 0
        first = [self._seen()[done]] if done.any() else ()
        first_infos = [{"c": {"begins": True}} for _ in envs[done]]
        rewards = [actions[0] * np.array([1.0, 10.0, 100.0])]
        return ArrayStep([seen], rewards, done & (envs % 2 == 0), done & (envs % 2 == 1), first, infos, first_infos)

    def close(self) -> None:
        self.is_closed = True

    def _seen(self) -> Any:
        seen = np.zeros((self.num_envs, len(AGENTS), 4), np.int64)
        seen[..., 0] = self.number
        seen[..., 1], seen[..., 2], seen[..., 3] = np.arange(self.num_envs)[:, None], np.arange(3), self.steps[:, None]
        return seen
