"""Several agents in an environment that numbers each one's observations and actions, and who does what when is drawn.

The numbers say whose and which an item is: agent "b"'s observations are 2000, 2001, …, its actions 2500, 2501, ….
`Told` keeps what happened as plain lists, to hold an episode against.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

from rollflow import MultiAgentEpisode
from rollflow.stream.data.tree import map_tree

AGENTS = ["a", "b", "c"]


def plain(tree: Any) -> Any:
    """Return the same values with lists and numbers for arrays."""
    return map_tree(lambda leaf: leaf.tolist() if isinstance(leaf, np.ndarray | np.generic) else leaf, tree)


@dataclass
class ToldAgent:
    """One agent's observations and actions as (env step, item), and each action's reward.

    `owed` is what it has received since an observation that it has not acted on.
    """

    first: int
    observations: list[tuple[int, int]] = field(default_factory=list)
    actions: list[tuple[int, int]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    owed: float = 0.0
    is_acting: bool = False
    is_terminated: bool = False
    is_truncated: bool = False

    @property
    def is_done(self) -> bool:
        return self.is_terminated or self.is_truncated

    def observe(self, at: int) -> int:
        item = self.first + len(self.observations)
        self.observations.append((at, item))
        self.is_acting = False
        return item

    def act(self) -> int:
        at = self.observations[-1][0]
        item = self.first + 500 + len(self.actions)
        self.actions.append((at, item))
        self.rewards.append(self.owed)
        self.owed = 0.0
        self.is_acting = True
        return item

    def items(self, name: str) -> dict[int, Any]:
        """Env step -> item."""
        if name == "observations":
            return dict(self.observations)
        if name == "infos":
            return {at: {"of": item} for at, item in self.observations}
        if name == "actions":
            return dict(self.actions)
        if name == "outputs":
            return {at: -item for at, item in self.actions}
        return {at: reward for (at, _), reward in zip(self.actions, self.rewards, strict=True)}


@dataclass
class Told:
    """Log of the agents' actions, and the env steps as an episode takes them; the first has the reset."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    agents: dict[str, ToldAgent] = field(default_factory=dict)

    @property
    def length(self) -> int:
        return len(self.steps) - 1

    @property
    def is_over(self) -> bool:
        return bool(self.agents) and all(agent.is_done for agent in self.agents.values())

    def episode(self, id_: str = "e", steps: int | None = None, numpy: bool = False) -> MultiAgentEpisode:
        """The first env steps of it, or all, as an episode."""
        episode = MultiAgentEpisode(id_, agent_episode_ids={agent_id: f"e-{agent_id}" for agent_id in AGENTS})
        episode.add_env_reset(observations=self.steps[0]["observations"], infos=self.steps[0]["infos"])
        for step in self.steps[1:][:steps]:
            episode.add_env_step(**step)
        return episode.to_numpy() if numpy else episode

    def reset(self, agent_ids: list[str]) -> None:
        step = _empty_step()
        for agent_id in agent_ids:
            self._enter(agent_id, step)
        self.steps.append(step)

    def go_on(self, moves: dict[str, tuple[bool, bool, bool, str]]) -> None:
        """Agent id -> whether it enters or is answered, whether it idles, whether it is paid, and how it ends."""
        step, at = _empty_step(), len(self.steps)
        for agent_id, (moves_on, idles, rewarded, end) in moves.items():
            agent = self.agents.get(agent_id)
            if agent is not None and agent.is_done:
                continue
            if agent is None:
                if rewarded:
                    step["rewards"][agent_id] = at / 10
                if moves_on:
                    self._enter(agent_id, step)
                continue
            if idles and not agent.is_acting:
                self._idle(agent_id, agent, step, rewarded, end)
            else:
                self._continue(agent_id, agent, step, moves_on, rewarded, end)
        self.steps.append(step)

    def _enter(self, agent_id: str, step: dict[str, Any]) -> None:
        agent = self.agents[agent_id] = ToldAgent(1000 * (1 + AGENTS.index(agent_id)))
        self._observe(agent_id, agent, step)

    def _observe(self, agent_id: str, agent: ToldAgent, step: dict[str, Any]) -> None:
        item = agent.observe(len(self.steps))
        step["observations"][agent_id], step["infos"][agent_id] = item, {"of": item}

    def _idle(self, agent_id: str, agent: ToldAgent, step: dict[str, Any], rewarded: bool, end: str) -> None:
        if rewarded:
            reward = step["rewards"][agent_id] = len(self.steps) / 10
            agent.owed += reward
        if end == "terminated":
            agent.is_terminated = step["terminateds"][agent_id] = True
        elif end == "truncated":
            agent.is_truncated = step["truncateds"][agent_id] = True

    def _continue(
        self, agent_id: str, agent: ToldAgent, step: dict[str, Any], answered: bool, rewarded: bool, end: str
    ) -> None:
        whole = answered and not agent.is_acting
        if not agent.is_acting:
            item = step["actions"][agent_id] = agent.act()
            step["extra_model_outputs"][agent_id] = {"minus": -item}
        if rewarded or whole:
            reward = step["rewards"][agent_id] = len(self.steps) / 10
            agent.rewards[-1] += reward
        if answered:
            self._observe(agent_id, agent, step)
        if end == "terminated":
            agent.is_terminated = step["terminateds"][agent_id] = True
            if not answered:
                last = agent.observations[-1][1]
                agent.observations.append((len(self.steps), last))
                step["infos"][agent_id] = {"of": last}
        elif end == "truncated" and answered:
            agent.is_truncated = step["truncateds"][agent_id] = True


def _empty_step() -> dict[str, Any]:
    names = ["observations", "actions", "rewards", "infos", "terminateds", "truncateds", "extra_model_outputs"]
    return {name: {} for name in names}


ends = st.sampled_from(["", "", "", "", "", "terminated", "truncated"])


@st.composite
def turns(draw: st.DrawFn, min_steps: int = 0, max_steps: int = 9, may_idle: bool = False) -> Told:
    """Agents that enter, act, wait, and leave in any order; the episode ends with the last of them, if it does.

    With `may_idle`, they may also have an observation and act only some env steps later, or never.
    """
    idling = st.booleans() if may_idle else st.just(False)
    moves = st.tuples(st.booleans(), idling, st.booleans(), ends)
    told = Told()
    told.reset(draw(st.lists(st.sampled_from(AGENTS), unique=True, min_size=1)))
    for _ in range(draw(st.integers(min_steps, max_steps))):
        if told.is_over:
            break
        told.go_on({agent_id: draw(moves) for agent_id in AGENTS})
    return told
