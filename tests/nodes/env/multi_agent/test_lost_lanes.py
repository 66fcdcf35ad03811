"""Lanes of several agents whose environments are lost again and again: what was made stands in the chunks."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from drawn_agents import Drawn, drawn_settings, made, run
from hypothesis import given, settings, strategies as st
from lost_agents import check_continuity, check_multi_agent_chunks, emitted_steps, not_emitted
from numbered_agents import NumberedAgents
from property_examples import examples

from rollflow import MultiAgentRollout
from rollflow.nodes import LambdaConnector
from rollflow.nodes.env.environments import Environments
from rollflow.nodes.rollout.placement import NODES

GOES_ON, LOST_BEFORE, LOST_AFTER, LOST_ELSEWHERE = range(4)


class Losing(Environments):
    """Loses a lane instead of its `events`' steps: before or after its environments made it, or elsewhere."""

    events: Sequence[int] = ()
    lost_with_lanes = 0

    @property
    def lost_steps(self) -> int:
        return self.lost_with_lanes

    def __call__(self, actions: Any) -> Any:
        lane, envs = actions, self.envs[actions.index]
        event = self.events[lane.vector_steps % len(self.events)] if self.events else GOES_ON
        if event == GOES_ON or self.is_lost_at.get(lane.index) == lane.vector_steps:
            return super().__call__(lane)
        self.is_lost_at[lane.index] = lane.vector_steps
        if event == LOST_AFTER:
            envs.step(lane.actions)
        self.lost_with_lanes += lane.lose("it broke", is_under_way=event != LOST_ELSEWHERE)
        lane.reset(*envs.reset())
        return lane


def losing(drawn: Drawn, events: Sequence[int], **options: Any) -> tuple[list[NumberedAgents], MultiAgentRollout]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(NODES, "inline", Losing)
        envs, rollout = made(drawn, **options)
    rollout.environments.events, rollout.environments.is_lost_at = events, {}
    return envs, rollout


@settings(max_examples=examples(25))
@given(drawn_settings, st.lists(st.integers(0, 3), min_size=1, max_size=7), st.integers(1, 6), st.integers(0, 1))
def test_every_agent_step_stands_in_a_chunk_or_is_counted_whenever_environments_are_lost(
    drawn: Drawn, events: list[int], count: int, prefetch: int
) -> None:
    envs, rollout = losing(drawn, events, prefetch=prefetch)
    fragments = run(rollout, count)
    missing = not_emitted(fragments, [env.log for env in envs])
    assert rollout.num_steps == len(emitted_steps(fragments))
    assert missing <= rollout.lost.get("workers", 0)
    assert rollout.lost.keys() <= {"workers"}
    check_continuity(fragments)
    check_multi_agent_chunks(fragments)


@settings(max_examples=examples(15))
@given(drawn_settings, st.lists(st.integers(0, 3), min_size=1, max_size=7))
def test_joint_pieces_see_the_episodes_that_begin_after_a_loss(drawn: Drawn, events: list[int]) -> None:
    seen: dict[str, list[int]] = {}

    def look(episodes: Any) -> None:
        for episode in episodes:  # one comes by at every one of its steps
            seen.setdefault(episode.id_, []).append(episode.env_t)

    envs, rollout = losing(drawn, events, joint_connector=lambda env: LambdaConnector(look))
    fragments = run(rollout, 4)
    assert not_emitted(fragments, [env.log for env in envs]) <= rollout.lost.get("workers", 0)
    assert all(steps == list(range(len(steps))) for steps in seen.values())
    assert {episode.id_ for fragment in fragments for episode in fragment.episodes()} <= seen.keys()


class OneWaits(NumberedAgents):
    """Episodes that go on and on: agent 1 acts once and never hears of it; agent 0 acts in every step."""

    def _draw_ends(self) -> tuple[dict[str, bool], dict[str, bool]]:
        return {"__all__": False}, {"__all__": False}

    def _draw_who_sees(self, *flags: Any) -> list[str]:
        return ["agent 0"]

    def _chance(self, chance: float) -> bool:
        return chance == 0.5 and self.env_step == 0


def test_an_agent_that_waits_loses_the_step_that_it_is_at() -> None:
    drawn = Drawn(1, 1, 2, 0, 100, False, 4, 1, False, 0)
    _, rollout = losing(
        drawn, [GOES_ON] * 6 + [LOST_ELSEWHERE] + [GOES_ON] * 20, env=[lambda: OneWaits(0, agents=2, nested=0)]
    )
    with rollout:
        fragments = iter(rollout.fragments())
        first, second = next(fragments), next(fragments)
        assert rollout.lost == {"workers": 1}  # agent 1's alone: agent 0's newest action reached nobody
    [before] = first.episodes()
    assert (len(before.agent_episodes["agent 0"]), len(before.agent_episodes["agent 1"])) == (4, 0)
    lost, begun = second.episodes()
    assert set(lost.agent_episodes) == {"agent 0"}  # agent 1 has no step, and nothing open
    assert (len(lost.agent_episodes["agent 0"]), lost.env_t_started, lost.env_t) == (2, 4, 6)
    assert begun.agent_episodes["agent 1"].id_ != before.agent_episodes["agent 1"].id_
    assert np.array_equal(begun.agent_episodes["agent 1"].get_observations(0), [0, 1, 1, 0, 0])
