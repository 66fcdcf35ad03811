"""Agents that may act, come and end next: held against drawn environments, and against impossible answers."""

from typing import Any

import numpy as np
import pytest
from drawn_agents import Drawn, drawn_settings, envs_of
from hypothesis import given, settings, strategies as st
from property_examples import examples
from wire_ends import refusing
from wire_messages import TOKEN, agent_rows, agents_hello, first_agent_rows

from rollflow.nodes.env.lane_envs import AgentLaneMaker
from rollflow.nodes.env.observation_check import Deviations
from rollflow.nodes.env.remote.env_host import HostLane
from rollflow.stream.data.errors import WireError
from rollflow.stream.wire import AgentForm, AgentRows, Reset, Step
from rollflow.stream.wire.session import AgentTurns, GatewaySession

INT = np.array


def begun() -> AgentTurns:
    turns = AgentTurns(agents_hello(), 2)
    turns.take(first_agent_rows())
    return turns


def flags(*those: int) -> tuple[Any, Any]:
    """Return flags of six agents in two parts, of four and of two; those with these numbers are set."""
    mask = np.isin(np.arange(6), those)
    return mask[:4], mask[4:]


def none_ended(**changed: Any) -> AgentRows:
    nothing: dict[str, Any] = {"ended": INT([], np.int64), "ended_truncated": INT([], bool), "terminateds": flags()}
    return agent_rows(**nothing | {"first_agent_slots": None, "first_obs": None} | changed)


def zeros(*given: float) -> tuple[Any, Any]:
    rewards = INT([*given, *[0.0] * (6 - len(given))], np.float32)
    return rewards[:4], rewards[4:]


@settings(max_examples=examples(20))
@given(drawn_settings, st.integers(0, 2**32 - 1))
def test_whatever_environments_tell_can_come_next(drawn: Drawn, seed: int) -> None:
    lane = HostLane(AgentLaneMaker(envs_of(drawn)[1], 0), 0, Deviations())
    said = agents_hello(**lane.describe() | {"slots": (drawn.envs,)})
    form, turns, rng = AgentForm.of(said), AgentTurns(said, drawn.envs), np.random.default_rng(seed)
    request: Reset | Step = Reset(0, 1, tuple(rng.integers(2**32, size=drawn.envs).tolist()), None)
    for number in range(2, 40):
        answer = form.check_rows(lane.answer(request), request, drawn.envs)
        turns.take(answer)
        actions = [rng.integers(7, size=len(slots)) for slots in turns.acting]
        request = form.check_request(Step(0, number, actions, turns.acting), drawn.envs)


def test_the_example_can_come_next() -> None:
    turns = begun()
    turns.take(agent_rows())
    with pytest.raises(
        WireError, match="environment 0, env step 0, agent 7: it ends, but is not there"
    ):  # slot 0 has begun anew
        turns.take(none_ended(number=3, terminateds=flags(4)))


CANT_COME: dict[str, tuple[AgentRows, str]] = {
    "nobody left": (agent_rows(ended=INT([1])), r"ended is \[1\], expected \[0\], in which no agent is left"),
    "still there": (
        none_ended(ended=INT([0]), ended_truncated=INT([False]), first_agent_slots=(), first_obs=()),
        r"ended is \[0\], expected \[\], in which no agent is left",
    ),
    "truncated by nobody": (
        agent_rows(ended_truncated=INT([True])),
        "environment 0, env step 0: its episode is said to be truncated, but none of its agents is",
    ),
    "terminated by nobody": (
        agent_rows(terminateds=flags(), truncateds=flags(0, 1)),
        "environment 0, env step 0: its episode is said to be terminated, but none of its agents is",
    ),
    "one that is not there": (
        none_ended(terminateds=flags(4)),
        "environment 0, env step 0, agent 7: it ends, but is not there",
    ),
    "one without a last word": (
        none_ended(truncateds=flags(3)),
        "environment 1, env step 0, agent 'blue': it is truncated after an action without an observation",
    ),
    "first of an episode that goes on": (
        agent_rows(first_agent_slots=(INT([0, 2]), INT([], np.int64))),
        "environment 1, env step 1, agent 'red': it has a first observation, but no episode has begun",
    ),
    "nobody to begin": (
        agent_rows(first_agent_slots=(INT([], np.int64), INT([], np.int64))),
        "environment 0, reset: its episode goes on, but no agent has an observation to act on",
    ),
    "nobody to act": (
        none_ended(agent_slots=(INT([0, 1]), INT([], np.int64))),
        "environment 1, env step 0: its episode goes on, but no agent has an observation to act on",
    ),
}


@pytest.mark.parametrize("name", CANT_COME)
def test_what_can_not_come_next_is_refused(name: str) -> None:
    answer, told = CANT_COME[name]
    turns = begun()
    with refusing("rows", f"step 2 of lane 0: {told}"):
        turns.take(answer)


def test_an_agent_that_has_ended_hears_of_nothing_more() -> None:
    one_each_ended = none_ended(agent_slots=(INT([0, 1, 2]), INT([1])), terminateds=flags(0, 2))
    for changed, told in (
        (
            {"agent_slots": (INT([0, 1]), INT([1]))},
            "environment 0, env step 1, agent 'red': it has an observation, but has ended before",
        ),
        (
            {"agent_slots": (INT([1]), INT([1])), "rewards": zeros(0, 0, 1.5)},
            "environment 1, env step 1, agent 'red': it has a reward",
        ),
        (
            {"agent_slots": (INT([1]), INT([1])), "terminateds": flags(2)},
            "environment 1, env step 1, agent 'red': it ends, but is not",
        ),
    ):
        turns = begun()
        turns.take(one_each_ended)
        with pytest.raises(WireError, match=told):
            turns.take(none_ended(**{"rewards": zeros(), **changed}))


def test_a_reset_in_which_nobody_can_act_is_refused() -> None:
    turns = GatewaySession(TOKEN, agents_hello(slots=(2, 2)), [0, 1], [0, 2]).turns_of(1)
    assert turns is not None
    with pytest.raises(
        WireError, match="reset 1 of lane 1: environment 3, reset: its episode goes on, but no agent has"
    ):
        turns.take(first_agent_rows(lane=1, agent_slots=(INT([0, 1]), INT([], np.int64))))


def test_a_reset_begins_everything_anew() -> None:
    turns = begun()
    turns.take(none_ended(terminateds=flags(0, 2)))
    turns.take(first_agent_rows(number=3))
    turns.take(agent_rows(number=4))
