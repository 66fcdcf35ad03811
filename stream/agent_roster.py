"""The agents of a multi-agent episode on its clock of env steps: how they come, go, and go on from chunk to chunk."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rollflow.stream.agent_join import begun_by, joined
from rollflow.stream.agent_share import NOTHING, AgentShare, EnvStep
from rollflow.stream.agent_timeline import AgentTimeline, Received, merged, sum_of
from rollflow.stream.episode import SingleAgentEpisode
from rollflow.stream.errors import EpisodeError, located

BeginEpisode = Callable[[Any, AgentShare, int], SingleAgentEpisode]
"""Agent id, first observation, number of its first step -> its episode, which has that observation."""


@dataclass(slots=True)
class AwaitedAgent:
    """An agent without an observation in a chunk: what it received so far, and the number of its first step."""

    received: Received = field(default_factory=dict)
    t_started: int = 0


@dataclass(slots=True)
class AgentRoster:
    """The agents of a chunk.

    env_t_started    env step at which the chunk begins, its lookback not counted
    env_t            env step at which it ends
    lookback         how many env steps of history there are
    timelines        those that have an observation, in the order of their first
    awaited          those that have none, but have received rewards, or a number to go on with
    """

    env_t_started: int = 0
    env_t: int = 0
    lookback: int = 0
    timelines: dict[Any, AgentTimeline] = field(default_factory=dict)
    awaited: dict[Any, AwaitedAgent] = field(default_factory=dict)

    @property
    def is_numpy(self) -> bool:
        """Whether the data are arrays."""
        return any(timeline.episode.observations.is_numpy for timeline in self.timelines.values())

    def unsettled_reward(self) -> Any:
        """What agents received that is no whole step's reward: since their last observation, or before their first."""
        rewards = [timeline.early_reward() + timeline.hung_reward() for timeline in self.timelines.values()]
        return sum_of([*rewards, *(sum_of(awaited.received.values()) for awaited in self.awaited.values())])

    def output_keys(self) -> list[str]:
        """The extra outputs that any agent has, in the order of the agents."""
        return list(dict.fromkeys(key for timeline in self.timelines.values() for key in timeline.output_keys()))

    # Growing

    def fill(
        self, steps: Sequence[EnvStep], lookback: int, agent_t_started: Mapping[Any, int], begin: BeginEpisode
    ) -> list[SingleAgentEpisode]:
        """Take a reset and the env steps after it, the first `lookback` of them as history.

        Agents begin with the numbers of steps given. Returns the episodes that the last env step has ended. Raises as
        `grow` does.
        """
        self.lookback = lookback
        self.env_t -= lookback
        self.reset(steps[0], begin)
        ended: list[SingleAgentEpisode] = []
        for step in steps[1:]:
            self.end_idle_agents(step)
            ended = self.grow(step, begin)
        for agent_id, timeline in self.timelines.items():
            timeline.settle(self.env_t_started, agent_t_started.get(agent_id, 0))
        return ended

    def reset(self, step: EnvStep, begin: BeginEpisode) -> None:
        """Take the reset's observations."""
        for agent_id in step.observations:
            self._begin(agent_id, step.share_of(agent_id), begin)

    def grow(self, step: EnvStep, begin: BeginEpisode) -> list[SingleAgentEpisode]:
        """Take an env step. Returns the episodes that it has ended.

        Raises EpisodeError or ColumnError for what an agent can't take; then nothing is taken.
        """
        everybody = self.timelines if step.all_terminated or step.all_truncated else ()
        shares = {agent_id: step.share_of(agent_id) for agent_id in dict.fromkeys([*step.agents(), *everybody])}
        for agent_id, share in shares.items():
            with located(f"agent '{agent_id}' at env step {self.env_t}"):
                if agent_id in self.timelines:
                    self.timelines[agent_id].check(share, self.env_t)
                elif share.acted:
                    raise EpisodeError("it acts before its first observation")
        live = [each.episode for each in self.timelines.values() if not each.episode.is_done]
        self.env_t += 1
        for agent_id, share in shares.items():
            if agent_id in self.timelines:
                self.timelines[agent_id].take(share, self.env_t - 1)
            elif share.observed:
                self._begin(agent_id, share, begin)
            elif share.reward is not NOTHING:
                self.awaited.setdefault(agent_id, AwaitedAgent()).received[self.env_t - 1] = share.reward
        return [episode for episode in live if episode.is_done]

    def end_idle_agents(self, step: EnvStep) -> None:
        """Let agents end that have an observation where `step` begins, and do not act on it."""
        for agent_id, timeline in list(self.timelines.items()):
            if timeline.last_seen != self.env_t or agent_id in step.actions or timeline.episode.is_done:
                continue
            if timeline.episode.rewards.total():
                timeline.end(terminated=True, truncated=False)
            else:
                del self.timelines[agent_id]

    def _begin(self, agent_id: Any, share: AgentShare, begin: BeginEpisode) -> None:
        """Take an agent's first observation; it leaves no trace where that is its last as well."""
        if share.ended:
            return
        awaited = self.awaited.pop(agent_id, AwaitedAgent())
        if share.reward is not NOTHING:
            awaited.received[self.env_t - 1] = share.reward
        episode = begin(agent_id, share, awaited.t_started)
        if self.is_numpy:
            episode.to_numpy()
        self.timelines[agent_id] = AgentTimeline(episode, [self.env_t], received=awaited.received)

    # Chunks

    def cut(self, wanted: int) -> "AgentRoster":
        """The next chunk's, with `wanted` env steps of lookback, as many as there are, or as hanging actions need."""
        live = {agent_id: each for agent_id, each in self.timelines.items() if not each.episode.is_done}
        needed = [self.env_t - each.last_seen for each in live.values() if each.pending is not None]
        there = self.lookback + self.env_t - self.env_t_started
        chunk = AgentRoster(self.env_t, self.env_t, max(min(wanted, there), *needed, 0))
        chunk.awaited = copy.deepcopy(self.awaited)
        for agent_id, timeline in live.items():
            if timeline.pending is not None or timeline.last_seen == self.env_t:
                chunk.timelines[agent_id] = timeline.cut(self.env_t - chunk.lookback)
            else:
                chunk.awaited[agent_id] = AwaitedAgent(timeline.received_between(timeline.last_seen, self.env_t))
        return chunk

    def part(self, start: int, stop: int, lookback: int) -> "AgentRoster":
        """What lies between two env steps, with so many before as lookback; an agent in a gap at its end is waiting."""
        part = AgentRoster(start, stop, lookback)
        from_start = start == self.env_t_started
        for agent_id, timeline in self.timelines.items():
            piece = timeline.part(start, stop, start - lookback, from_start=from_start)
            if piece is not None:
                part.timelines[agent_id] = piece
            elif not (timeline.episode.is_done and timeline.last_seen <= start):
                since = min([start, *timeline.received]) if from_start else start
                part._await(agent_id, timeline.received_between(since, stop), timeline.step_after(stop))
        for agent_id, awaited in self.awaited.items():
            since = min([start, *awaited.received]) if from_start else start
            received = {env_step: reward for env_step, reward in awaited.received.items() if since <= env_step < stop}
            part._await(agent_id, received, awaited.t_started)
        return part

    def joined(self, other: "AgentRoster") -> "AgentRoster":
        """This chunk's and the next one's together, with this one's lookback; it shares none of the other's lists.

        Raises EpisodeError where an agent's two parts do not meet, ColumnError where the other's data do not fit into
        this one's arrays.
        """
        timelines = dict(self.timelines)
        for agent_id, tail in other.timelines.items():
            with located(f"agent '{agent_id}'"):
                if agent_id in timelines:
                    timelines[agent_id] = joined(timelines[agent_id], tail)
                else:
                    received = self.awaited[agent_id].received if agent_id in self.awaited else {}
                    timelines[agent_id] = begun_by(tail, received, as_arrays=self.is_numpy)
        awaited = {agent_id: each for agent_id, each in self.awaited.items() if agent_id not in timelines}
        for agent_id, more in copy.deepcopy(other.awaited).items():
            if agent_id in timelines:
                timelines[agent_id] = timelines[agent_id].with_received(more.received)
            else:
                before = awaited[agent_id].received if agent_id in awaited else {}
                awaited[agent_id] = AwaitedAgent(merged(before, more.received), more.t_started)
        return AgentRoster(self.env_t_started, other.env_t, self.lookback, timelines, awaited)

    def _await(self, agent_id: Any, received: Received, t_started: int) -> None:
        if received or t_started:
            self.awaited[agent_id] = AwaitedAgent(received, t_started)

    # State

    def get_state(self) -> dict[str, Any]:
        """Everything; the data are copies."""
        return {
            "env_t_started": self.env_t_started,
            "env_t": self.env_t,
            "lookback": self.lookback,
            "agents": {agent_id: timeline.get_state() for agent_id, timeline in self.timelines.items()},
            "awaited": {agent_id: asdict(awaited) for agent_id, awaited in self.awaited.items()},
        }

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> "AgentRoster":
        """The roster that `get_state()` was asked of."""
        return AgentRoster(
            state["env_t_started"],
            state["env_t"],
            state["lookback"],
            {agent_id: AgentTimeline.from_state(each) for agent_id, each in state["agents"].items()},
            {agent_id: AwaitedAgent(**copy.deepcopy(each)) for agent_id, each in state["awaited"].items()},
        )
