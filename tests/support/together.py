"""An environment with several agents, each in an environment of its own."""

from typing import Any

import gymnasium as gym

from rollflow.nodes.env.multi_agent_env import MultiAgentEnv


class Together(MultiAgentEnv):
    """Environments by agents, which act in every step; each ends by itself, and all begin again together."""

    def __init__(self, envs: dict[str, gym.Env[Any, Any]]) -> None:
        self.envs, self.possible_agents = envs, list(envs)
        self.observation_spaces = {agent: env.observation_space for agent, env in envs.items()}
        self.action_spaces = {agent: env.action_space for agent, env in envs.items()}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed, options=options)
        seeds = [None if seed is None else seed + place for place in range(len(self.envs))]
        begun = {agent: env.reset(seed=own) for (agent, env), own in zip(self.envs.items(), seeds, strict=True)}
        return tuple({agent: told[i] for agent, told in begun.items()} for i in range(2))

    def step(self, actions: Any) -> Any:
        made = {agent: self.envs[agent].step(action) for agent, action in actions.items()}
        return tuple({agent: told[i] for agent, told in made.items()} for i in range(5))

    def close(self) -> None:
        for env in self.envs.values():
            env.close()
