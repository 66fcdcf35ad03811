"""How an agent's part of one chunk is joined by its part of the next."""

import copy

from rollflow.stream.agent_timeline import AgentTimeline, Received, merged, sum_of
from rollflow.stream.episode import SingleAgentEpisode
from rollflow.stream.errors import EpisodeError


def joined(head: AgentTimeline, tail: AgentTimeline) -> AgentTimeline:
    """Both, with the lookback of `head`. Where `head` ends with a pending action, the first of `tail` answers it.

    `head` stays as it is. Raises EpisodeError where the two do not meet, ColumnError where the data of `tail` do not
    fit the arrays of `head`.
    """
    begin = tail.lookback
    first_seen = tail.observed_at[begin]
    if head.episode.is_done and tail.episode.is_done and tail.last_seen == head.last_seen:
        return head  # the end is where the two meet, and in both
    if head.episode.is_done:
        raise EpisodeError(f"it ended at env step {head.last_seen}, but it is in the chunk to join")
    if first_seen < head.last_seen:
        raise EpisodeError(f"its observation at env step {first_seen} is in both chunks")
    received = merged(head.received, tail.received)
    episode = _to_be_grown(head.episode)
    observed_at = head.observed_at
    if first_seen > head.last_seen:
        episode.concat_episode(_between(head, tail, received))
        observed_at = [*observed_at, first_seen]
    episode.concat_episode(tail.episode)
    if episode.observations.is_numpy:
        episode.to_numpy()  # actions and rewards too, where there had been none to make arrays of
    return AgentTimeline(episode, observed_at + tail.observed_at[begin + 1 :], tail.pending, received)


def begun_by(tail: AgentTimeline, received: Received, *, as_arrays: bool) -> AgentTimeline:
    """A timeline of its own with the current data of `tail`, and what the agent `received` before."""
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
    return AgentTimeline(episode, tail.observed_at[begin:], tail.pending, merged(received, tail.received))


def _to_be_grown(episode: SingleAgentEpisode) -> SingleAgentEpisode:
    """The same data in an episode that may be joined, which makes new buffers, while this one stays."""
    twin = copy.copy(episode)
    twin.custom_data = dict(episode.custom_data)
    return twin


def _between(head: AgentTimeline, tail: AgentTimeline, received: Received) -> SingleAgentEpisode:
    """The step from the last observation of `head` to the first of `tail`, answering the pending action."""
    first_seen, t = tail.observed_at[tail.lookback], head.episode.t
    if head.pending is None:
        raise EpisodeError(
            f"it has not acted since its observation at env step {head.last_seen}, but it has another one at env step "
            f"{first_seen} in the chunk to join"
        )
    if tail.episode.t_started != t + 1:
        raise EpisodeError(f"it ends with an action at its step {t}, but joins at its step {tail.episode.t_started}")
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
