"""Episodes of environments with several agents, assembled from the columns of a lane or of a fragment."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from rollflow.stream.episodes.agent_timeline import AgentTimeline, AwaitedAgent, merged
from rollflow.stream.episodes.multi_agent import MultiAgentEpisode
from rollflow.stream.episodes.single_agent import SingleAgentEpisode, refusal

if TYPE_CHECKING:
    from rollflow.stream.multi_agent.agent_fragment import AgentFragment, EnvClock
    from rollflow.stream.multi_agent.agent_lane import AgentLane
    from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment
    from rollflow.stream.multi_agent.multi_agent_lane import MultiAgentLane

E = TypeVar("E", bound=MultiAgentEpisode)


class LiveMultiAgentEpisode(MultiAgentEpisode):
    """The ongoing episode of an environment: reading it reads the lane's columns, `set_…` writes them.

    Its agents are those that live, and those that the last step has ended. To keep the data, copy them:
    `MultiAgentEpisode.from_state(episode.get_state())`. Only the environment adds steps.
    """

    add_env_reset = add_env_step = concat_episode = refusal("only the environment of its rollout adds to it")


def sealed_episode(fragment: "MultiAgentFragment", env: int, nth: int) -> MultiAgentEpisode:
    """The chunk of the `nth` episode of an environment in a fragment, read-only but for a copy by its state."""
    clock = fragment.clock
    started, end = clock.start(env, nth), clock.end_of(env, nth)
    stop = clock.first + fragment.num_rows if end is None else end[0]
    key = env, int(clock.numbers[env]) + nth
    timelines = _sealed_timelines(fragment, env, nth, started, stop)
    episode = _made(MultiAgentEpisode, fragment.parts, clock, env, nth, stop, timelines)
    episode.custom_data.update(fragment.custom_data.get(key, {}))
    episode.lane, episode.slot = fragment.lane, fragment.env_slot(env)
    return episode


def live_episode(lane: "MultiAgentLane", env: int, *, has_ended: bool) -> LiveMultiAgentEpisode:
    """The episode of an environment: the one that the last step has ended, or the one that goes on."""
    clock, now = lane.clock, lane.vector_steps
    nth = clock.count(env) - 1 - has_ended
    started, key = clock.start(env, nth), (env, int(clock.numbers[env]) + nth)
    timelines = chain.from_iterable(
        _live_timelines(each, env, started, now, has_ended=has_ended) for each in lane.parts
    )
    parts = [part.fragment for part in lane.parts]
    episode = _made(LiveMultiAgentEpisode, parts, clock, env, nth, now, timelines)
    episode.custom_data = lane.custom_data.setdefault(key, {})
    episode.lane = lane.index
    return episode


def _awaited(
    parts: Sequence["AgentFragment"], env: int, started: int, stop: int, timelines: Mapping[Any, AgentTimeline]
) -> dict[Any, AwaitedAgent]:
    """Give timelines the rewards before their first observations; those of agents without an observation so far.

    started, stop    vector steps between which the episode is
    """
    awaited: dict[Any, AwaitedAgent] = {}
    for part in parts:
        for place, vector_step, reward in part.early_in(env, started, stop):
            agent = part.part.agents[place]
            early = timelines.get(agent) or awaited.setdefault(agent, AwaitedAgent())
            early.received = merged({vector_step - 1 - started: np.float32(reward)}, early.received)
    return awaited


def _made(
    kind: type[E],
    parts: Sequence["AgentFragment"],
    clock: "EnvClock",
    env: int,
    nth: int,
    stop: int,
    of_agents: Iterable[AgentTimeline],
) -> E:
    """An episode with its agents, its place on the clock of env steps, and its end.

    stop    vector step at which it ends
    """
    started, all_agents = clock.start(env, nth), [(agent, each.part) for each in parts for agent in each.part.agents]
    timelines = {timeline.episode.agent_id: timeline for timeline in of_agents}
    awaited = _awaited(parts, env, started, stop, timelines)
    begin = max(clock.first, started) - started
    oldest = min((timeline.observed_at[0] for timeline in timelines.values()), default=begin)
    episode = kind(
        clock.episode_id(env, int(clock.numbers[env]) + nth),
        observation_space={agent: part.observation_space for agent, part in all_agents},
        action_space={agent: part.recorded_space for agent, part in all_agents},
        env_t_started=begin,
        agent_episode_ids={agent: timeline.episode.id_ for agent, timeline in timelines.items()},
        agent_module_ids={agent: timeline.episode.module_id for agent, timeline in timelines.items()},
    )
    episode.env_t, episode._lookback = stop - started, max(0, begin - oldest)
    episode._timelines, episode._awaited, episode._is_reset = timelines, awaited, True
    episode.slot = env
    end = clock.end_of(env, nth)
    if end is not None:
        episode.is_truncated, episode.is_terminated = end[1], not end[1]
    return episode


# Timelines of a lane's agents


def _live_timelines(part: "AgentLane", env: int, started: int, now: int, *, has_ended: bool) -> Iterator[AgentTimeline]:
    """The agents of one part that live or have just ended."""
    first = env * len(part.part.agents)
    for slot in range(first, first + len(part.part.agents)):
        ends = part.has_ended(slot)
        if not ends and (has_ended or not part.lives[slot]):
            continue
        episode, row = part.live(slot), int(part.at[slot])
        observed_at = (part.fragment.clock[max(0, part.start_of(slot)) : row + 1, slot] - started).tolist()
        if ends:
            observed_at[-1] = now - started
        timeline = AgentTimeline(episode, observed_at)
        if not ends and part.waits[slot]:
            timeline.pending = part.fragment.action_in(row, slot)
            timeline.received = {now - started - 1: part.received[slot]}
        yield timeline


# Timelines of a fragment's agents


def _sealed_timelines(
    fragment: "MultiAgentFragment", env: int, nth: int, started: int, stop: int
) -> Iterator[AgentTimeline]:
    """The agents that were in an episode, part by part; in each, those with steps in the fragment come first."""
    chunks = {key[:2]: (view, index) for key, view, index in fragment.agent_chunks.get((env, nth), ())}
    for number, part in enumerate(fragment.parts):
        first_slot, places = env * len(part.part.agents), range(len(part.part.agents))
        for place in places:
            if (number, place) in chunks:
                view, index = chunks[number, place]
                row = int(view.chunks.stop[index])
                yield _timeline(part, view.chunk(index), first_slot + place, row, started, stop)
        for slot in (first_slot + place for place in places if (number, place) not in chunks):
            row = int(part.stops[slot])
            goes_on = part.waits[slot] or part.acts[slot]
            if goes_on and fragment.clock.nth(env, int(part.clock[row, slot])) == nth:
                yield _timeline(part, part.rest_of(slot), slot, row, started, stop)


def _timeline(
    part: "AgentFragment", episode: SingleAgentEpisode, slot: int, row: int, started: int, stop: int
) -> AgentTimeline:
    """An agent's chunk on the clock of its environment's episode, with the action that waits for an observation.

    row              of the observation after its last step
    started, stop    vector steps between which the environment's episode is
    """
    times = part.times(row - episode.rewards.total(), row, slot, has_ended=episode.is_done)
    timeline = AgentTimeline(episode, (times - started).tolist())
    if part.waits[slot] and not episode.is_done:
        timeline.pending = part.of_module(episode.module_id).action_in(int(part.stops[slot]), slot)
        timeline.received = {stop - started - 1: np.float32(part.received[slot])}
    return timeline
