"""Memory of a rollout of several agents that come and go is flat, however long it runs."""

from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import pytest

from rollflow import MultiAgentRollout
from rollflow.nodes import MultiAgentEnv, RandomModule

MORE = 3 << 20  # bytes: what the allocator and torch may still take at the beginning


class Guests(MultiAgentEnv):
    """Six agents, who come and leave at any time, each once in an episode; it has 30 steps."""

    def __init__(self) -> None:
        self.possible_agents = [f"guest {number}" for number in range(6)]
        self.observation_spaces = dict.fromkeys(self.possible_agents, gym.spaces.Box(-1, 1, (20,), np.float32))
        self.action_spaces = dict.fromkeys(self.possible_agents, gym.spaces.Discrete(2))
        self._random = np.random.default_rng(0)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._left = 30
        self.agents, self._waiting = self.possible_agents[:3], self.possible_agents[3:]
        return self._seen(), {}

    def step(self, actions: Any) -> Any:
        self._left -= 1
        leaving = [agent for agent in self.agents if len(self.agents) > 1 and self._random.random() < 0.05]
        leaving = leaving[: len(self.agents) - 1]
        coming = [agent for agent in self._waiting if self._random.random() < 0.05]
        self._waiting = [agent for agent in self._waiting if agent not in coming]
        rewards = dict.fromkeys(self.agents, 1.0)
        gone = {agent: True for agent in leaving}
        seen = self._seen()
        self.agents = [agent for agent in self.agents if agent not in leaving] + coming
        return seen | self._seen(), rewards, gone | {"__all__": self._left == 0}, {"__all__": False}, {}

    def _seen(self) -> dict[str, Any]:
        return {agent: np.zeros(20, np.float32) for agent in self.agents}


def taken() -> int:
    """Bytes of this process."""
    return int(psutil.Process().memory_info().rss)


@pytest.mark.slow
def test_memory_stays_flat_however_long_it_runs() -> None:
    options: Any = {"num_envs": 4, "fragment_length": 32, "num_fragments": 400, "seed": 0}
    with MultiAgentRollout(Guests, module=RandomModule, **options) as made:
        for number, _ in enumerate(made.batches()):
            if number == 150:
                before = taken()
    assert number == 399
    assert taken() - before < MORE
