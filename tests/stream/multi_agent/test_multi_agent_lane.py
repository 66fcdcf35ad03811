"""A lane of two agents, stepped by hand: each has a row of its own."""

from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest

from rollflow.stream import ColumnError
from rollflow.stream.multi_agent.agent_part import AgentPart, Observed, PartStep, VectorStep
from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment
from rollflow.stream.multi_agent.multi_agent_lane import MultiAgentLane

PART = AgentPart(("a", "b"), gym.spaces.Box(0, 100, (), np.float32), gym.spaces.Discrete(50))


class Serving(NamedTuple):
    module_id: str
    is_removed: bool = False


class ByAgent:
    is_by_agent = True

    def module_of(self, agent: Any, episode_id: str) -> Serving:
        return Serving({"a": "m", "b": "n"}[agent])


NOBODY = np.zeros(2, np.bool_)


def lane_of(num_rows: int = 2, lookback: int = 1) -> MultiAgentLane:
    """One environment, in which `a` is served by the module "m" and `b` by "n"."""
    return MultiAgentLane(
        0,
        (PART,),
        1,
        num_rows=num_rows,
        lookback=lookback,
        name="here",
        mapping=ByAgent(),
        shared_data=lambda module: {},
    )


def observed(values: dict[str, float]) -> Observed:
    slots = np.array(["ab".index(agent) for agent in sorted(values)], np.int64)
    return Observed(slots, np.array([values[agent] for agent in sorted(values)], np.float32))


def act(lane: MultiAgentLane, action: int) -> None:
    """Everybody who must acts, with this action, by version `action` of its module."""
    [part] = lane.parts
    for module, slots in part.by_module(part.acting):
        part.record_actions(slots, {"actions": np.full(len(slots), action)}, module, action)


def step(
    lane: MultiAgentLane,
    seen: dict[str, float],
    rewards: tuple[float, float] = (0.0, 0.0),
    *,
    terminated: str = "",
    first: dict[str, float] | None = None,
) -> None:
    """One vector step; with `first`, the last of the episode."""
    flags = np.array([agent in terminated for agent in "ab"])
    told = PartStep(observed(seen), np.array(rewards, np.float32), flags, NOBODY)
    over = first is not None
    ended = np.arange(int(over))
    firsts = [observed(first)] if first is not None else []
    lane.record_step(VectorStep([told], ended, np.zeros(len(ended), np.bool_), firsts, (), ()))
    for part in lane.parts:
        part.commit_ended()


def fragments_of_one_who_waits() -> list[MultiAgentFragment]:
    """`a` acts in each of six env steps; `b` acts once, and hears of it with the sixth: three fragments."""
    lane, fragments = lane_of(), []
    lane.reset([observed({"a": 0.0, "b": 50.0})], ())
    for number in range(1, 7):
        act(lane, number)
        step(lane, {"a": float(number)} | ({"b": 51.0} if number == 6 else {}), (1.0, 10.0))
        if lane.is_full:
            fragments.append(lane.cut())
    return fragments


def test_an_action_may_wait_over_whole_fragments() -> None:
    *before, last = fragments_of_one_who_waits()
    for number, fragment in enumerate(before):
        assert fragment.num_steps == 2
        assert fragment.policy_versions() == {"m": 2 * number + 1}
        [episode] = fragment.episodes()
        assert (episode.env_t_started, episode.env_t) == (2 * number, 2 * number + 2)
        assert episode.get_agents_to_act() == {"a"}
        assert episode.get_actions(-1, "b", env_steps=False) == {"b": 1}
        assert episode.get_rewards(-1, "b", env_steps=False) == {"b": 20.0 * (number + 1)}
        assert len(episode.agent_episodes["b"]) == 0
    [chunk] = last.agent_episodes("n")
    assert (chunk.t_started, len(chunk), chunk.get_return()) == (0, 1, 60.0)
    assert chunk.get_observations().tolist() == [50.0, 51.0]
    assert chunk.get_extra_model_outputs("policy_version").tolist() == [1]
    assert last.policy_versions() == {"m": 5, "n": 1}


def test_a_chunk_looks_back_by_its_agents_own_steps() -> None:
    lane = lane_of(lookback=2)
    lane.reset([observed({"a": 0.0, "b": 50.0})], ())
    chunks = []
    for number in range(1, 7):
        act(lane, number)
        step(lane, {"a": float(number)} | ({"b": 50.0 + number} if number % 2 == 0 else {}), (1.0, 1.0))
        if lane.is_full:
            chunks.append(next(iter(lane.cut().agent_episodes("n"))))
    assert [(each.t_started, len(each), each.rewards.lookback) for each in chunks] == [(0, 1, 0), (1, 1, 1), (2, 1, 2)]
    last = chunks[-1]
    assert last.get_observations(slice(-2, None), neg_index_as_lookback=True).tolist() == [50.0, 52.0, 54.0, 56.0]
    assert last.get_actions(slice(-2, 0), neg_index_as_lookback=True).tolist() == [1, 3]


def test_an_agent_that_ends_without_an_observation_has_the_one_before_once_more() -> None:
    lane = lane_of(num_rows=3)
    lane.reset([observed({"a": 0.0, "b": 50.0})], ())
    act(lane, 1)
    step(lane, {"a": 1.0}, (1.0, 2.0), terminated="b")
    act(lane, 2)
    step(lane, {"a": 2.0}, (1.0, 0.0), terminated="a", first={"b": 60.0})
    act(lane, 3)
    step(lane, {"b": 61.0}, (0.0, 5.0))
    fragment = lane.cut()
    ended, next_one = fragment.agent_episodes("n")
    assert (ended.is_terminated, next_one.is_terminated) == (True, False)
    assert ended.get_observations().tolist() == [50.0, 50.0]
    assert next_one.get_observations().tolist() == [60.0, 61.0]
    assert fragment.of_module("n").last_observations().tolist() == [50.0, 61.0]
    assert [(each.id_ == fragment.episode_id(0, 0), each.is_terminated) for each in fragment.episodes()] == [
        (True, True),
        (False, False),
    ]


def test_what_is_not_there_is_refused_by_name() -> None:
    fragment = fragments_of_one_who_waits()[0]
    with pytest.raises(KeyError, match="module 'z' has not acted"):
        fragment.of_module("z")
    [part] = fragment.parts
    with pytest.raises(ColumnError, match="module 'z' has not acted"):
        part.of_module("z")
    with pytest.raises(ValueError, match="read-only"):
        part.columns["rewards"].tree[0] = 1.0


def test_outputs_that_change_between_steps_are_refused() -> None:
    lane: Any = lane_of()
    lane.reset([observed({"a": 0.0})], ())
    act(lane, 1)
    step(lane, {"a": 1.0})
    [part] = lane.parts
    with pytest.raises(
        ColumnError, match=r"the outputs of module 'm' changed between steps: missing \[\], new \['x'\]"
    ):
        part.record_actions(part.acting, {"actions": np.zeros(1, int), "x": np.zeros(1)}, 0, 0)
