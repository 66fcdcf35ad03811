"""Stable-Baselines3's ReplayBuffer, with transitions of many environments."""

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from stable_baselines3.common.buffers import ReplayBuffer

from benchmarks.pairs import Run


def peer(fragments: list[dict[str, Any]], capacity: int, slots: int) -> tuple[Run, Callable[[int], Run], Any]:
    """Functions that insert all fragments, step by step, and that sample a batch of a size; it has no priorities."""
    obs = fragments[0]["obs"]
    space = gym.spaces.Box(
        -np.inf if obs.dtype.kind == "f" else 0, np.inf if obs.dtype.kind == "f" else 255, obs.shape[2:], obs.dtype.type
    )
    buffer = ReplayBuffer(
        capacity,
        space,
        gym.spaces.Discrete(2),
        "cpu",
        slots,
        optimize_memory_usage=True,
        handle_timeout_termination=False,
    )
    infos: list[dict[str, Any]] = [{}] * slots

    def insert() -> int:
        steps = 0
        for each in fragments:
            for row in range(len(each["rewards"])):
                ends = each["terminateds"][row] | each["truncateds"][row]
                buffer.add(
                    each["obs"][row], each["new_obs"][row], each["actions"][row], each["rewards"][row], ends, infos
                )
                steps += slots
        return steps

    def sampler(size: int) -> Run:
        return lambda: len(buffer.sample(size).rewards)

    while not buffer.full:
        insert()
    return insert, sampler, None
