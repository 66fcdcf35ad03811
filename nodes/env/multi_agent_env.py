"""Environments with several agents: dicts, by the conventions of RLlib's `MultiAgentEnv`, arrays, or PettingZoo's."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rollflow.stream.data.cached_property import cached_property
from rollflow.stream.data.errors import EnvError, shown
from rollflow.stream.data.tree import Tree, map_tree
from rollflow.stream.episodes.agent_timeline import ALL_AGENTS
from rollflow.stream.multi_agent.agent_part import AgentPart, Spaces, parts_of

AgentDict = Mapping[Any, Any]  # agent -> value
Told = tuple[AgentDict, AgentDict, AgentDict, AgentDict, AgentDict]


class MultiAgentEnv(gym.Env[Any, Any]):
    """An environment with several agents that act in turns or at once, come and go.

        possible_agents       every agent that there can be
        observation_spaces    agent -> space of its observations
        action_spaces         agent -> space of its actions

    An agent that gets an observation and has not ended must act in the next step; the others must not. A reward may
    come to any agent that has not ended. An agent ends by its flag, or with everybody by that of "__all__"; one that
    does not get a last observation as it terminates ends with the one it had. The episode ends by "__all__" or with its
    last agent. An agent that has ended stays away until the next reset.
    """

    possible_agents: Sequence[Any] = ()
    observation_spaces: Spaces | None = None
    action_spaces: Spaces | None = None

    def reset(  # type: ignore[override]  # of several agents
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[AgentDict, AgentDict]:
        """Begin an episode. Returns observations and infos, agent -> value; here, seeds `np_random`."""
        super().reset(seed=seed, options=options)
        return {}, {}

    def step(self, actions: AgentDict) -> Told:  # type: ignore[override]  # of several agents
        """Take the actions, agent -> action. Returns observations, rewards, terminateds, truncateds, infos by agent."""
        raise NotImplementedError

    def get_observation_space(self, agent: Any) -> gym.Space[Any]:
        """The space of an agent's observations. Raises KeyError if there is none."""
        return (self.observation_spaces or {})[agent]

    def get_action_space(self, agent: Any) -> gym.Space[Any]:
        """The space of an agent's actions. Raises KeyError if there is none."""
        return (self.action_spaces or {})[agent]


class AgentSpaces(NamedTuple):
    """Which agents there can be, and the spaces of each."""

    agents: tuple[Any, ...]
    observation_spaces: dict[Any, gym.Space[Any]]
    action_spaces: dict[Any, gym.Space[Any]]


def agent_spaces(env: Any) -> AgentSpaces:
    """Agents and spaces of an environment: a `MultiAgentEnv`, RLlib's, or one that looks like them.

    Without `possible_agents`, its `agents` are taken; if there are no dicts of spaces, it is asked for each agent's.
    Raises EnvError if that leaves something open.
    """
    for method in ("reset", "step"):
        if not callable(getattr(env, method, None)):
            raise EnvError(f"{shown(env)} has no method '{method}', expected a MultiAgentEnv")
    return agents_of(env)


def agents_of(env: Any) -> AgentSpaces:
    """Agents and spaces of anything that has them. Raises EnvError as `agent_spaces` does."""
    agents = tuple(getattr(env, "possible_agents", None) or getattr(env, "agents", None) or ())
    if not agents:
        text = "'possible_agents' is missing or empty, expected every agent that there can be"
        raise EnvError(f"{text}; an environment of one agent is for Rollout")
    if len(set(agents)) < len(agents) or ALL_AGENTS in agents:
        raise EnvError(f"'possible_agents' is {list(agents)}, expected each agent once, and none named '{ALL_AGENTS}'")
    observation_spaces = {agent: _space_of(env, "observation", agent) for agent in agents}
    return AgentSpaces(agents, observation_spaces, {agent: _space_of(env, "action", agent) for agent in agents})


def _space_of(env: Any, kind: str, agent: Any) -> gym.Space[Any]:
    spaces, method = getattr(env, f"{kind}_spaces", None), getattr(env, f"get_{kind}_space", None)
    if isinstance(spaces, Mapping):
        space = spaces.get(agent)
    else:
        try:
            space = method(agent) if callable(method) else None
        except (KeyError, TypeError) as error:
            raise EnvError(
                f"agent {agent!r}: '{kind}_spaces' is {shown(spaces)}, expected a dict: agent -> gymnasium.Space, or "
                f"'get_{kind}_space' to give the agent's, which raises {error!r}"
            ) from error
    if not isinstance(space, gym.Space):
        raise EnvError(
            f"agent {agent!r}: its {kind} space is {shown(space)}, expected a gymnasium.Space in '{kind}_spaces' or "
            f"from 'get_{kind}_space'"
        )
    return space


AgentInfos = Sequence[Mapping[Any, Mapping[str, Any]]]


class ArrayStep(NamedTuple):
    """Arrays that one step of N environments gave, per part of A agents; E of their episodes ended with it."""

    observations: Sequence[Tree]  # any[N, A, ...]: after the step; of an episode that ended, the last
    rewards: Sequence[NDArray[Any]]  # number[N, A]
    terminateds: NDArray[np.bool_]  # bool[N]
    truncateds: NDArray[np.bool_]  # bool[N]
    first: Sequence[Tree] = ()  # any[E, A, ...]: where episodes ended, the next ones' first observations; () if E is 0
    infos: AgentInfos = ()  # per environment: agent -> info; () where there are none
    first_infos: AgentInfos = ()  # per environment whose episode ended; () likewise


class MultiAgentVectorEnv(ABC):
    """N environments whose agents all act in every step, and whose episodes end for all agents at once.

        num_envs              N
        possible_agents       the agents of each environment
        observation_spaces    agent -> space of its observations
        action_spaces         agent -> space of its actions

    Agents with the same two spaces are one of `parts`, in the order of `possible_agents`. Actions and observations come
    per part, as trees of arrays `any[N, A, ...]`: environments first, then the part's agents. An episode that ends is
    followed by the next one in the same step. Arrays that are returned may be written over by the next step.
    """

    num_envs: int
    possible_agents: Sequence[Any]
    observation_spaces: Spaces
    action_spaces: Spaces

    @cached_property
    def parts(self) -> tuple[AgentPart, ...]:
        """The parts, in the order of their first agents."""
        return parts_of(self.possible_agents, self.observation_spaces, self.action_spaces)

    @abstractmethod
    def reset_arrays(self, seeds: Sequence[int] | None) -> tuple[Sequence[Tree], AgentInfos]:
        """Begin an episode everywhere, with a seed for each of N, or with the generators that there are.

        Returns the first observations per part, any[N, A, ...], and per environment agent -> info; () for none.
        """

    @abstractmethod
    def step_arrays(self, actions: Sequence[Tree]) -> ArrayStep:
        """Take everybody's actions, per part any[N, A, ...]."""

    def close(self) -> None:
        """Give back what the environments hold."""
        return None


class _Adapter(MultiAgentEnv):
    def __init__(self, env: Any) -> None:
        self.env = env
        agents = self.possible_agents = tuple(getattr(env, "possible_agents", ()))
        self.observation_spaces = {agent: env.observation_space(agent) for agent in agents}
        self.action_spaces = {agent: env.action_space(agent) for agent in agents}

    @property
    def unwrapped(self) -> Any:
        """PettingZoo's environment without its wrappers."""
        return self.env.unwrapped

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
        """Take the action of the agent whose turn it is. Raises EnvError if another's is given."""
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
    """The environment, or its adapter if it is one of PettingZoo's."""
    if "pettingzoo" not in sys.modules:
        return env
    from pettingzoo import AECEnv, ParallelEnv

    if isinstance(env, AECEnv):
        return PettingZooEnv(env)
    return ParallelPettingZooEnv(env) if isinstance(env, ParallelEnv) else env


def _with_all(
    terminateds: Mapping[Any, bool], truncateds: Mapping[Any, bool], env: Any
) -> tuple[dict[Any, bool], dict[Any, bool]]:
    """The flags with those of "__all__": if the last agents ended in both ways, each has its own alone."""
    is_over, some_truncated = not env.agents, any(truncateds.values())
    all_truncated = is_over and some_truncated and not any(terminateds.values())
    all_terminated = is_over and not some_truncated
    return {**terminateds, ALL_AGENTS: all_terminated}, {**truncateds, ALL_AGENTS: all_truncated}
