"""AgentRoster: the agents of a multi-agent episode, how they come and go, and how chunks are cut and joined."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rollflow.stream.data.errors import EpisodeError, located
from rollflow.stream.episodes.agent_step import NOTHING, AgentShare, EnvStep
from rollflow.stream.episodes.agent_timeline import AgentTimeline, Received, merged, sum_of
from rollflow.stream.episodes.single_agent import SingleAgentEpisode

BeginEpisode = Callable[[Any, AgentShare, int], SingleAgentEpisode]
"""(agent id, first observation, number of its first step) -> its episode with that observation."""


@dataclass(slots=True)
class AwaitedAgent:
    """An agent without an observation in a chunk: its rewards so far, and the number of its first step."""

    received: Received = field(default_factory=dict)
    t_started: int = 0


@dataclass(slots=True)
class AgentRoster:
    """The agents of a chunk.

    env_t_started    env step at which the chunk begins, without its lookback
    env_t            env step at which it ends
    lookback         number of env steps of history
    timelines        agents with an observation, in the order of their first
    awaited          agents without one that have received rewards, or have the number of their next step
    """

    env_t_started: int = 0
    env_t: int = 0
    lookback: int = 0
    timelines: dict[Any, AgentTimeline] = field(default_factory=dict)
    awaited: dict[Any, AwaitedAgent] = field(default_factory=dict)

    @property
    def is_numpy(self) -> bool:
        """True if the data are arrays."""
        return any(timeline.episode.observations.is_numpy for timeline in self.timelines.values())

    def unsettled_reward(self) -> Any:
        """Sum of the rewards that belong to no whole step: since an agent's last observation, or before its first."""
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

        agent_t_started    agent id -> number of its first step after the history

        Returns the episodes that the last env step has ended. Raises as `grow` does.
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
        """Take an env step; return the episodes that it has ended.

        Raises EpisodeError or ColumnError for data that an agent can't take; then nothing is taken.
        """
        all_agents = self.timelines if step.all_terminated or step.all_truncated else ()
        shares = {agent_id: step.share_of(agent_id) for agent_id in dict.fromkeys([*step.agents(), *all_agents])}
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
        """End agents that have an observation where `step` begins, and do not act on it."""
        for agent_id, timeline in list(self.timelines.items()):
            if timeline.last_seen != self.env_t or agent_id in step.actions or timeline.episode.is_done:
                continue
            if timeline.episode.rewards.total():
                timeline.end(terminated=True, truncated=False)
            else:
                del self.timelines[agent_id]

    def _begin(self, agent_id: Any, share: AgentShare, begin: BeginEpisode) -> None:
        """Take an agent's first observation; if it is also the last one, the agent is left out but for its rewards."""
        awaited = self.awaited.get(agent_id, AwaitedAgent())
        if share.reward is not NOTHING:
            awaited.received[self.env_t - 1] = share.reward
        if share.ended:
            self._await(agent_id, awaited.received, awaited.t_started)
            return
        self.awaited.pop(agent_id, None)
        episode = begin(agent_id, share, awaited.t_started)
        if self.is_numpy:
            episode.to_numpy()
        self.timelines[agent_id] = AgentTimeline(episode, [self.env_t], received=awaited.received)

    # Chunks

    def cut(self, wanted: int) -> "AgentRoster":
        """The roster of the next chunk, with up to `wanted` env steps of lookback, or what hanging actions need."""
        live = {agent_id: each for agent_id, each in self.timelines.items() if not each.episode.is_done}
        needed = [self.env_t - each.last_seen for each in live.values() if each.pending is not None]
        available = self.lookback + self.env_t - self.env_t_started
        chunk = AgentRoster(self.env_t, self.env_t, max(min(wanted, available), *needed, 0))
        chunk.awaited = copy.deepcopy(self.awaited)
        for agent_id, timeline in live.items():
            if timeline.pending is not None or timeline.last_seen == self.env_t:
                chunk.timelines[agent_id] = timeline.cut(self.env_t - chunk.lookback)
            else:
                chunk.awaited[agent_id] = AwaitedAgent(timeline.received_between(timeline.last_seen, self.env_t))
        return chunk

    def part(self, start: int, stop: int, lookback: int) -> "AgentRoster":
        """The roster between two env steps, after `lookback` env steps of history; agents in a gap at the end wait."""
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
        """The roster of this chunk and the next one together, with this one's lookback; it shares no list of `other`.

        Raises EpisodeError if an agent's two parts do not meet, ColumnError if the other's data do not fit this one's
        arrays.
        """
        timelines = dict(self.timelines)
        for agent_id, tail in other.timelines.items():
            with located(f"agent '{agent_id}'"):
                if agent_id in timelines:
                    timelines[agent_id] = _joined(timelines[agent_id], tail)
                else:
                    before = self.awaited[agent_id].received if agent_id in self.awaited else {}
                    received = _continued(before, tail.received, other.env_t_started)
                    timelines[agent_id] = _begun_by(tail, received, as_arrays=self.is_numpy)
        awaited = {agent_id: each for agent_id, each in self.awaited.items() if agent_id not in timelines}
        for agent_id, more in copy.deepcopy(other.awaited).items():
            if agent_id in timelines:
                timelines[agent_id] = timelines[agent_id].with_received(more.received)
            else:
                before = awaited[agent_id].received if agent_id in awaited else {}
                awaited[agent_id] = AwaitedAgent(_continued(before, more.received, other.env_t_started), more.t_started)
        return AgentRoster(self.env_t_started, other.env_t, self.lookback, timelines, awaited)

    def _await(self, agent_id: Any, received: Received, t_started: int) -> None:
        if received or t_started:
            self.awaited[agent_id] = AwaitedAgent(received, t_started)

    # State

    def get_state(self) -> dict[str, Any]:
        """The state as a dict; the data are copies."""
        return {
            "env_t_started": self.env_t_started,
            "env_t": self.env_t,
            "lookback": self.lookback,
            "agents": {agent_id: timeline.get_state() for agent_id, timeline in self.timelines.items()},
            "awaited": {agent_id: asdict(awaited) for agent_id, awaited in self.awaited.items()},
        }

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> "AgentRoster":
        """The roster of a state that `get_state()` returned."""
        return AgentRoster(
            state["env_t_started"],
            state["env_t"],
            state["lookback"],
            {agent_id: AgentTimeline.from_state(each) for agent_id, each in state["agents"].items()},
            {agent_id: AwaitedAgent(**copy.deepcopy(each)) for agent_id, each in state["awaited"].items()},
        )


def _continued(before: Received, after: Received, seam: int) -> Received:
    """The rewards of an awaited agent in two chunks; those of before the seam may be in the second as well, summed."""
    return dict(after) if any(env_step < seam for env_step in after) else merged(before, after)


def _joined(head: AgentTimeline, tail: AgentTimeline) -> AgentTimeline:
    """Both timelines together, with the lookback of `head`. The first observation of `tail` answers a pending action.

    `head` is unchanged. Raises EpisodeError if the two do not meet, ColumnError if the data of `tail` do not fit the
    arrays of `head`.
    """
    begin = tail.lookback
    first_seen = tail.observed_at[begin]
    if head.episode.is_done and tail.episode.is_done and tail.last_seen == head.last_seen:
        return head  # the chunks meet at the agent's end, which both have
    if head.episode.is_done:
        raise EpisodeError(f"it ended at env step {head.last_seen}, but it is in the chunk to join")
    if first_seen < head.last_seen:
        raise EpisodeError(f"its observation at env step {first_seen} is in both chunks")
    received = merged(head.received, tail.received)
    episode = copy.copy(head.episode)  # with the same buffers, which joining replaces
    episode.custom_data = dict(episode.custom_data)
    observed_at = head.observed_at
    if first_seen > head.last_seen:
        episode.concat_episode(_between(head, tail, received))
        observed_at = [*observed_at, first_seen]
    episode.concat_episode(tail.episode)
    if episode.observations.is_numpy:
        episode.to_numpy()  # actions and rewards too, if there were none before
    return AgentTimeline(episode, observed_at + tail.observed_at[begin + 1 :], tail.pending, received)


def _begun_by(tail: AgentTimeline, received: Received, *, as_arrays: bool) -> AgentTimeline:
    """A new timeline with the current data of `tail`, and the rewards that the agent `received`."""
    begin, theirs = tail.lookback, tail.episode
    episode = SingleAgentEpisode(
        theirs.id_,
        observations=[theirs.get_observations(0)],
        infos=[theirs.get_infos(0)],
        observation_space=theirs.observation_space,
        action_space=theirs.action_space,
        t_started=theirs.t_started,
        agent_id=theirs.agent_id,
        module_id=theirs.module_id,
        multi_agent_episode_id=theirs.multi_agent_episode_id,
    )
    episode.concat_episode(theirs)
    if as_arrays:
        episode.to_numpy()
    return AgentTimeline(episode, tail.observed_at[begin:], tail.pending, received)


def _between(head: AgentTimeline, tail: AgentTimeline, received: Received) -> SingleAgentEpisode:
    """The step from the last observation of `head` to the first of `tail`, answering the pending action."""
    first_seen, t = tail.observed_at[tail.lookback], head.episode.t
    if head.pending is None:
        raise EpisodeError(
            f"the chunk to join has an observation at env step {first_seen}, but the agent has not acted since its "
            f"observation at env step {head.last_seen}; expected chunks that follow each other"
        )
    if tail.episode.t_started != t + 1:
        raise EpisodeError(
            f"the agent's last action is at its step {t}, but the chunk to join begins at its step "
            f"{tail.episode.t_started}; expected step {t + 1}"
        )
    parts = [reward for env_step, reward in received.items() if head.last_seen <= env_step < first_seen]
    return SingleAgentEpisode(
        head.episode.id_,
        observations=[head.episode.get_observations(-1), tail.episode.get_observations(0)],
        infos=[head.episode.get_infos(-1), tail.episode.get_infos(0)],
        actions=[head.pending.action],
        rewards=[sum_of(parts)],
        extra_model_outputs={key: [item] for key, item in head.pending.extra_model_outputs.items()},
        t_started=t,
        len_lookback_buffer=0,
    )
