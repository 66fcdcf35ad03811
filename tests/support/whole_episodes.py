"""Whole episodes, held against the chunks that they were before, of one agent or of several."""

from collections.abc import Iterable, Sequence
from typing import Any

from piece_forms import equal

from rollflow import MultiAgentEpisode, SingleAgentEpisode


def copied(episode: Any) -> Any:
    """A copy, with its place."""
    made = type(episode).from_state(episode.get_state())
    made.lane, made.slot = episode.lane, episode.slot
    return made


def joined(chunks: Iterable[Any]) -> dict[str, Any]:
    """The episodes that chunks make, by id: each chunk without its lookback behind the one before."""
    whole: dict[str, Any] = {}
    for chunk in chunks:
        if chunk.id_ in whole:
            whole[chunk.id_].concat_episode(copied(chunk))
        else:
            whole[chunk.id_] = copied(chunk)
    return whole


def steps_of(episode: Any) -> int:
    """Steps of its agent, or of its agents."""
    if isinstance(episode, SingleAgentEpisode):
        return len(episode)
    return sum(map(len, episode.agent_episodes.values()))


def assert_same(one: Any, other: Any, *, without: Sequence[str] = ()) -> None:
    """All of two episodes that does not depend on how they were put together.

    without    extra outputs that may differ
    """
    for name in ("id_", "is_terminated", "is_truncated", "custom_data", "lane", "slot"):
        assert getattr(one, name) == getattr(other, name), name
    if isinstance(one, SingleAgentEpisode):
        _assert_same_steps(one, other, without)
        return
    assert isinstance(one, MultiAgentEpisode)
    assert one.env_t_started == other.env_t_started == 0
    assert one.env_t == other.env_t
    theirs = {agent: episode for agent, episode in other.agent_episodes.items() if len(episode)}
    assert one.agent_ids == theirs.keys()
    for agent, episode in one.agent_episodes.items():
        for name in ("id_", "agent_id", "module_id", "multi_agent_episode_id", "is_terminated", "is_truncated"):
            assert getattr(episode, name) == getattr(theirs[agent], name), name
        _assert_same_steps(episode, theirs[agent], without)
        query: Any = {"env_steps": True, "agent_ids": agent, "return_list": True}
        equal(one.get_observations(**query), other.get_observations(**query))
    assert one.get_return(include_hanging_rewards=True) == other.get_return(include_hanging_rewards=True)


def _assert_same_steps(one: SingleAgentEpisode, other: SingleAgentEpisode, without: Sequence[str]) -> None:
    for each in (one, other):
        assert each.t_started == 0
        assert each.is_numpy
    figures = [each.get_data_dict() for each in (one, other)]
    assert figures[0].pop("infos") == figures[1].pop("infos")
    for each in figures:
        for name in without:
            each.pop(name, None)
    equal(figures[0], figures[1])
    equal(one.get_observations(), other.get_observations())
    assert list(one.get_infos()) == list(other.get_infos())
