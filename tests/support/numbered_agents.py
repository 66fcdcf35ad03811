"""An environment with several agents that numbers the steps of each: who comes, acts, waits and leaves is drawn.

Nothing is lost, doubled or shifted without a number that does not fit. Without torch, as `numbered_env`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from rollflow.nodes.env.multi_agent_env import MultiAgentEnv
from rollflow.stream.data.tree import leaves_of, map_tree

NUM_ACTIONS = 7
ABSENT, ACTS, WAITS, ENDED = range(4)

NUMBERS = gym.spaces.Box(0, 2**31, (5,), np.int64)
NESTED = gym.spaces.Dict({"at": NUMBERS, "agent": gym.spaces.Discrete(1000)})


class AgentsTold(NamedTuple):
    """A step, or a reset, which has env step 0 and no actions; dicts by agents, with arrays of their own."""

    episode: int
    env_step: int
    actions: dict[str, int]
    observations: dict[str, tuple[int, ...]]  # (slot, agent, episode, env step, agent step)
    rewards: dict[str, float]
    terminateds: dict[str, bool]
    truncateds: dict[str, bool]
    infos: dict[str, dict[str, Any]]


class NumberedAgents(MultiAgentEnv):
    """Observations are (slot, agent, episode, env step, the agent's step); rewards count over the environment's life.

        slot       its number among others
        agents     how many there can be
        nested     how many of them, the first ones, have a Dict space with the same in "at"
        length     an episode's most env steps; the last ends it for everybody
        at_once    everybody comes with the reset, acts in each step, and ends with the episode

    The agents' observations are arrays that it writes over. `log` holds every reset and step.
    """

    def __init__(self, slot: int, *, agents: int = 4, nested: int = 1, length: int = 8, at_once: bool = False) -> None:
        self.slot, self.length, self.at_once = slot, length, at_once
        self.possible_agents = [f"agent {number}" for number in range(agents)]
        self.observation_spaces = {
            agent: NESTED if number < nested else NUMBERS for number, agent in enumerate(self.possible_agents)
        }
        self.action_spaces = {agent: gym.spaces.Discrete(NUM_ACTIONS) for agent in self.possible_agents}
        self.episode, self.rewarded = -1, 0
        self.log: list[AgentsTold] = []
        self.closed = False
        self._buffers = {agent: np.zeros(5, np.int64) for agent in self.possible_agents}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed, options=options)
        self.episode += 1
        self.env_step = 0
        self.states = dict.fromkeys(self.possible_agents, ABSENT)
        self.agent_steps = dict.fromkeys(self.possible_agents, 0)
        coming = [agent for agent in self.possible_agents if self.at_once or self._chance(0.5)]
        observations = {agent: self._observe(agent) for agent in coming or [self._one_of(self.possible_agents)]}
        return self._told({}, observations, {}, {}, {})[::4]

    def step(self, actions: Any) -> Any:
        acting = {agent for agent, state in self.states.items() if state == ACTS}
        assert set(actions) == acting, f"actions of {set(actions)}, expected {acting}"
        self.env_step += 1
        for agent in acting:
            self.states[agent] = WAITS
            self.agent_steps[agent] += 1
        terminateds, truncateds = self._draw_ends()
        ending = {agent for flags in (terminateds, truncateds) for agent, is_set in flags.items() if is_set}
        seeing = self._draw_who_sees(terminateds, truncateds)
        rewards = {
            agent: self._reward()
            for agent, state in self.states.items()
            if state != ENDED and ((agent in acting and agent in seeing) or self._chance(0.4))
        }
        observations = {agent: self._observe(agent) for agent in self._shuffled(seeing)}
        for agent in ending & set(self.possible_agents):
            self.states[agent] = ENDED
        return self._told(actions, observations, rewards, terminateds, truncateds)

    def close(self) -> None:
        self.closed = True

    # What is drawn

    def _draw_ends(self) -> tuple[dict[str, bool], dict[str, bool]]:
        flags: tuple[dict[str, bool], dict[str, bool]] = {"__all__": False}, {"__all__": False}
        is_last = self.env_step >= self.length
        for agent, state in self.states.items():
            if state != ENDED and not self.at_once and self._chance(0.05 if state == ABSENT else 0.12):
                flags[self._chance(0.5)][agent] = True
        if is_last or self._chance(0.05):
            flags[self._chance(0.5)]["__all__"] = True
        return flags

    def _draw_who_sees(self, terminateds: dict[str, bool], truncateds: dict[str, bool]) -> list[str]:
        is_over = terminateds["__all__"] or truncateds["__all__"]
        live = [agent for agent, state in self.states.items() if state == WAITS]
        ending = {agent for agent in self.states if terminateds.get(agent) or truncateds.get(agent)}
        seeing = set(live) if self.at_once else {agent for agent in live if self._chance(0.5)}
        seeing |= {agent for agent in live if truncateds["__all__"] or truncateds.get(agent)}
        absent = [agent for agent, state in self.states.items() if state == ABSENT and agent not in ending]
        seeing |= {agent for agent in absent if not is_over and self._chance(0.15)}
        staying = [agent for agent in live if agent not in ending]
        if not is_over and not seeing - ending and staying:
            seeing.add(self._one_of(staying))
        return [agent for agent in self.possible_agents if agent in seeing]

    def _chance(self, chance: float) -> bool:
        return bool(self.np_random.random() < chance)

    def _one_of(self, agents: list[str]) -> str:
        return agents[int(self.np_random.integers(len(agents)))]

    def _shuffled(self, agents: list[str]) -> list[str]:
        return [agents[place] for place in self.np_random.permutation(len(agents))]

    # What is told

    def _reward(self) -> float:
        self.rewarded += 1
        return float(self.rewarded)

    def _observe(self, agent: str) -> Any:
        self.states[agent] = ACTS
        number = self.possible_agents.index(agent)
        at = self._buffers[agent]
        at[:] = self.slot, number, self.episode, self.env_step, self.agent_steps[agent]
        return {"at": at, "agent": number} if self.observation_spaces[agent] is NESTED else at

    def _told(self, actions: Any, observations: Any, rewards: Any, terminateds: Any, truncateds: Any) -> Any:
        infos = {agent: {"step": self.env_step} for agent in observations if self.env_step % 3 == 1}
        acted = {agent: int(action) for agent, action in actions.items()}
        seen = {agent: tuple(self._buffers[agent].tolist()) for agent in observations}
        ends = dict(terminateds), dict(truncateds)
        copied = {agent: dict(info) for agent, info in infos.items()}
        self.log.append(AgentsTold(self.episode, self.env_step, acted, seen, dict(rewards), *ends, copied))
        return observations, rewards, terminateds, truncateds, infos


class NumberedTeam(NumberedAgents):
    """Numbered steps of agents that come, wait and leave, of an environment that says where it stands."""

    NAMES = "episode", "rewarded", "env_step", "states", "agent_steps"

    def get_state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.NAMES}

    def set_state(self, state: dict[str, Any]) -> None:
        for name in self.NAMES:
            setattr(self, name, state[name])


class SilentTeam(NumberedAgents):
    """The same steps, of an environment that says nothing, and begins each episode as the first."""

    def reset(self, **given: Any) -> Any:
        self.episode, self.rewarded = -1, 0
        return super().reset(**given)


def numbered_agents(count: int, **kwargs: Any) -> tuple[list[NumberedAgents], list[Callable[[], NumberedAgents]]]:
    """`count` environments, numbered as slots 0 … count - 1, and callables that hand them out."""
    envs = [NumberedAgents(slot, **kwargs) for slot in range(count)]
    return envs, [lambda env=env: env for env in envs]  # type: ignore[misc]


def rows_of(observed: Any) -> list[tuple[int, Any]]:
    """(slot, observation) of what a vector step shows of a part."""
    count = len(leaves_of(observed.observations)[0])
    slots = range(count) if observed.slots is None else observed.slots.tolist()
    return [(slot, map_tree(lambda leaf, k=k: leaf[k], observed.observations)) for k, slot in enumerate(slots)]
