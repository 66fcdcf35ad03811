"""The ongoing episodes of environments with several agents, for pieces that look at all agents of one together."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from rollflow.stream.agent_roster import AgentRoster
from rollflow.stream.agent_timeline import AgentTimeline
from rollflow.stream.errors import EpisodeError
from rollflow.stream.multi_agent.agent_lane import AgentLane
from rollflow.stream.multi_agent_episode import MultiAgentEpisode

if TYPE_CHECKING:
    from rollflow.stream.multi_agent.multi_agent_lane import MultiAgentLane


class LiveMultiAgentEpisode(MultiAgentEpisode):
    """What an environment's agents have seen and done: reading it reads the lane's columns, `set_…` writes them.

    Agents are those that live, and those that the last step has ended. To keep what it shows, copy it:
    `MultiAgentEpisode.from_state(episode.get_state())`. Only the environment adds steps to it.
    """

    def add_env_reset(self, **kwargs: Any) -> NoReturn:
        """Refused: the environment does it."""
        self._refuse()

    def add_env_step(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: the environment does it."""
        self._refuse()

    def concat_episode(self, other: MultiAgentEpisode) -> NoReturn:
        """Refused: the environment adds to it."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise EpisodeError(f"episode '{self.id_}' is a rollout's: only its environment adds to it")


def live_episode(lane: "MultiAgentLane", env: int, *, has_ended: bool) -> LiveMultiAgentEpisode:
    """The episode of an environment: the one that the last step has ended, or the one that goes on."""
    clock, now = lane.clock, lane.vector_steps
    nth = clock.count(env) - 1 - has_ended
    started, number = clock.start(env, nth), int(clock.numbers[env]) + nth
    timelines = {
        agent: timeline
        for part in lane.parts
        for agent, timeline in _timelines(part, env, started, now, has_ended=has_ended)
    }
    begin = max(clock.first, started)
    oldest = min((timeline.observed_at[0] for timeline in timelines.values()), default=begin - started)
    id_ = lane.episode_ids(env, number)
    episode = LiveMultiAgentEpisode(
        id_,
        observation_space={agent: part.observation_space for part in lane.parts for agent in part.part.agents},
        action_space={agent: part.part.action_space for part in lane.parts for agent in part.part.agents},
        agent_episode_ids={agent: timeline.episode.id_ for agent, timeline in timelines.items()},
        agent_module_ids={agent: timeline.episode.module_id for agent, timeline in timelines.items()},
    )
    episode._roster = AgentRoster(begin - started, now - started, max(0, begin - started - oldest), timelines)
    episode._is_reset = True
    episode.custom_data = lane.custom_data.setdefault((env, number), {})
    if has_ended:
        end = clock.end_of(env, nth)
        assert end is not None
        episode.is_truncated, episode.is_terminated = end[1], not end[1]
    for timeline in timelines.values():
        timeline.episode.multi_agent_episode_id = id_
    return episode


def _timelines(
    part: AgentLane, env: int, started: int, now: int, *, has_ended: bool
) -> Iterator[tuple[Any, AgentTimeline]]:
    first = env * len(part.part.agents)
    for place, agent in enumerate(part.part.agents):
        slot = first + place
        ends = part.ended is not None and part.ended.has(slot)
        if not ends and (has_ended or not part.lives[slot]):
            continue
        episode, row = part.live[slot], int(part.at[slot])
        starts = part.ended.starts if ends and part.ended is not None else part.episode_start
        observed_at = (part.fragment.clock[max(0, int(starts[slot])) : row + 1, slot] - started).tolist()
        if ends:
            observed_at[-1] = now - started
        timeline = AgentTimeline(episode, observed_at)
        if not ends and part.waits(slot):
            timeline.pending = part.fragment_for(int(part.module[slot])).action_in(row, slot)
            timeline.received = {now - started - 1: part.received(slot)}
        yield agent, timeline
