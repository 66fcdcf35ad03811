"""PettingZoo's environments as dict environments: `pip install rollflow[pettingzoo]`."""

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from rollflow.nodes.env.multi_agent_env import AgentDict, MultiAgentEnv, Told
from rollflow.stream.data.errors import EnvError
from rollflow.stream.data.tree import map_tree
from rollflow.stream.episodes.agent_step import ALL_AGENTS


class _Adapter(MultiAgentEnv):
    def __init__(self, env: Any) -> None:
        self.env = env
        agents = self.possible_agents = tuple(getattr(env, "possible_agents", ()))
        self.observation_spaces = {agent: env.observation_space(agent) for agent in agents}
        self.action_spaces = {agent: env.action_space(agent) for agent in agents}

    def close(self) -> None:
        """Close the environment."""
        self.env.close()

    def render(self) -> Any:
        """Give what the environment shows."""
        return self.env.render()


class ParallelPettingZooEnv(_Adapter):
    """A PettingZoo `ParallelEnv`: all agents act at once."""

    def reset(  # type: ignore[override]  # of several agents
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[AgentDict, AgentDict]:
        """Begin an episode."""
        observations, infos = self.env.reset(seed=seed, options=options)
        return observations, infos or {}

    def step(self, actions: AgentDict) -> Told:  # type: ignore[override]  # of several agents
        """Take everybody's action."""
        observations, rewards, terminateds, truncateds, infos = self.env.step(dict(actions))
        return observations, rewards, *_with_all(terminateds, truncateds, self.env), infos or {}


class PettingZooEnv(_Adapter):
    """A PettingZoo `AECEnv`: agents act in turn.

    An agent has an observation when it is its turn; with it come its rewards since its last turn. Agents that have
    ended get their last observation and their rewards as the environment has them take leave, in the step in which
    their turn comes.
    """

    def reset(  # type: ignore[override]  # of several agents
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[AgentDict, AgentDict]:
        """Begin an episode: the agent whose turn it is has an observation."""
        self.env.reset(seed=seed, options=options)
        observation, _, _, _, info = self.env.last()
        agent = self.env.agent_selection
        return {agent: observation}, {agent: info}

    def step(self, actions: AgentDict) -> Told:  # type: ignore[override]  # of several agents
        """Take the action of the agent whose turn it is. Raises EnvError where another's is given."""
        env = self.env
        if [*actions] != [env.agent_selection]:
            raise EnvError(f"actions of {list(actions)}, expected one of agent {env.agent_selection!r}: it is its turn")
        env.step(actions[env.agent_selection])
        observations: dict[Any, Any] = {}
        rewards: dict[Any, Any] = {}
        terminateds: dict[Any, Any] = {}
        truncateds: dict[Any, Any] = {}
        infos: dict[Any, Any] = {}
        while env.agents:
            agent = env.agent_selection
            observation, rewards[agent], terminateds[agent], truncateds[agent], info = env.last()
            if not (terminateds[agent] or truncateds[agent]):
                observations[agent], infos[agent] = observation, info
                break
            # What comes next may write over both.
            observations[agent], infos[agent] = map_tree(np.array, observation), dict(info)
            env.step(None)
            if agent in env.agents:
                raise EnvError(f"agent {agent!r} has ended, but is among the agents after its step with None")
        return observations, rewards, *_with_all(terminateds, truncateds, env), infos


def adapted(env: Any) -> Any:
    """The environment, or where it is one of PettingZoo's, its adapter."""
    if "pettingzoo" not in sys.modules:
        return env
    from pettingzoo import AECEnv, ParallelEnv

    if isinstance(env, AECEnv):
        return PettingZooEnv(env)
    return ParallelPettingZooEnv(env) if isinstance(env, ParallelEnv) else env


def _with_all(
    terminateds: Mapping[Any, bool], truncateds: Mapping[Any, bool], env: Any
) -> tuple[dict[Any, bool], dict[Any, bool]]:
    """The flags with those of "__all__": where the last agents ended in both ways, each has its own alone."""
    is_over, some_truncated = not env.agents, any(truncateds.values())
    all_truncated = is_over and some_truncated and not any(terminateds.values())
    all_terminated = is_over and not some_truncated
    return {**terminateds, ALL_AGENTS: all_terminated}, {**truncateds, ALL_AGENTS: all_truncated}
