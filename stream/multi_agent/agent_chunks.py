"""Multi-agent episodes out of the columns of a fragment."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from rollflow.stream.agent_roster import AgentRoster
from rollflow.stream.agent_timeline import AgentTimeline
from rollflow.stream.episode import SingleAgentEpisode
from rollflow.stream.multi_agent.agent_fragment import AgentFragment
from rollflow.stream.multi_agent_episode import MultiAgentEpisode

if TYPE_CHECKING:
    from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment


class SealedMultiAgentEpisode(MultiAgentEpisode):
    """A chunk of a fragment, read-only: to change it, copy it by `MultiAgentEpisode.from_state(chunk.get_state())`."""

    def __init__(self, id_: str, roster: AgentRoster, **options: Any) -> None:
        super().__init__(id_, **options)
        self._roster, self._is_reset = roster, True


def episode_of(fragment: "MultiAgentFragment", env: int, nth: int) -> SealedMultiAgentEpisode:
    """The chunk of an environment's episode, its `nth` in the fragment."""
    clock = fragment.clock
    started, end = clock.start(env, nth), clock.end_of(env, nth)
    stop = clock.first + fragment.num_rows if end is None else end[0]
    begin = max(clock.first, started)
    number = int(clock.numbers[env]) + nth
    id_ = fragment.episode_id(env, number)
    timelines = {}
    for part in fragment.parts:
        for agent, timeline in _timelines(fragment, part, env, nth, started, stop):
            timeline.episode.multi_agent_episode_id = id_
            timelines[agent] = timeline
    oldest = min((timeline.observed_at[0] for timeline in timelines.values()), default=begin - started)
    roster = AgentRoster(begin - started, stop - started, max(0, begin - started - oldest), timelines)
    episode = SealedMultiAgentEpisode(
        id_,
        roster,
        observation_space={agent: part.part.observation_space for part in fragment.parts for agent in part.part.agents},
        action_space={agent: part.part.action_space for part in fragment.parts for agent in part.part.agents},
        agent_episode_ids={agent: timeline.episode.id_ for agent, timeline in timelines.items()},
        agent_module_ids={agent: timeline.episode.module_id for agent, timeline in timelines.items()},
    )
    episode.custom_data.update(fragment.custom_data.get((env, number), {}))
    if end is not None:
        episode.is_truncated, episode.is_terminated = end[1], not end[1]
    return episode


def _timelines(
    fragment: "MultiAgentFragment", part: AgentFragment, env: int, nth: int, started: int, stop: int
) -> Iterator[tuple[Any, AgentTimeline]]:
    """What the agents of one part did in an episode."""
    first_slot = env * len(part.part.agents)
    chunks, clock = part.chunks, fragment.clock
    low, high = np.searchsorted(chunks.slot, [first_slot, first_slot + len(part.part.agents)])
    with_steps = set()
    for index in range(int(low), int(high)):
        slot, start = int(chunks.slot[index]), int(chunks.start[index])
        if clock.nth(env, int(part.clock[start, slot])) != nth:
            continue
        module_id = part.module_ids[int(part.chunk_modules[index])]
        timeline = _timeline(part, part.of_module(module_id).chunk_at(start, slot), slot, int(chunks.stop[index]))
        with_steps.add(slot)
        yield _named(part, slot, module_id, timeline, started, stop)
    for slot in range(first_slot, first_slot + len(part.part.agents)):
        row = int(part.stops[slot])
        if slot in with_steps or not (part.waits[slot] or part.acts[slot]):
            continue
        if clock.nth(env, int(part.clock[row, slot])) == nth:
            timeline = _timeline(part, part.rest_of(slot), slot, row)
            yield _named(part, slot, part.module_ids[int(part.serves[slot])], timeline, started, stop)


def _timeline(part: AgentFragment, episode: SingleAgentEpisode, slot: int, stop: int) -> AgentTimeline:
    """An agent's chunk with the vector steps of its observations."""
    begin = stop - episode.rewards.total()
    observed_at = part.clock[begin : stop + 1, slot].tolist()
    if episode.is_done:
        observed_at[-1] = part.ends[stop - 1, slot]
    return AgentTimeline(episode, observed_at)


def _named(
    part: AgentFragment, slot: int, module_id: Any, timeline: AgentTimeline, started: int, stop: int
) -> tuple[Any, AgentTimeline]:
    """The agent's id, and its timeline on the episode's own clock, with what waits for an observation."""
    agent = part.part.agents[slot % len(part.part.agents)]
    timeline.observed_at = [step - started for step in timeline.observed_at]
    timeline.episode.agent_id, timeline.episode.module_id = agent, module_id
    if part.waits[slot] and not timeline.episode.is_done:
        timeline.pending = part.of_module(module_id).action_in(int(part.stops[slot]), slot)
        timeline.received = {stop - started - 1: np.float32(part.received[slot])}
    return agent, timeline
