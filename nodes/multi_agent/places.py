"""Where something went wrong: the environment, its step, the agent."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollflow.nodes.multi_agent.agent_slots import AgentSlots


class Places:
    """Says for errors where environments stand.

    steps    i64[N], env steps of each environment's episode; -1: it is being reset
    """

    def __init__(self, slots: AgentSlots, first_env: int) -> None:
        self._slots = slots
        self._first_env = first_env
        self.steps: NDArray[np.int64] = np.full(slots.num_envs, -1)

    def at(self, env: int) -> str:
        """The environment and its step."""
        step = self.steps[env]
        return f"environment {self._first_env + env}, {'reset' if step < 0 else f'env step {step}'}"

    def of_agent(self, env: int, agent: Any) -> str:
        """The same, and an agent."""
        return f"{self.at(env)}, agent {agent!r}"

    def of(self, number: int) -> str:
        """Environment, step and agent of a number."""
        return self.of_agent(int(self._slots.envs[number]), self._slots.agents[number])
