"""Answers and requests of hosts, held against their spaces, what was asked and who may come next."""

from typing import Any

import numpy as np
import pytest
from drawn_agents import Drawn, drawn_settings, envs_of
from gymnasium import spaces
from hypothesis import given, settings, strategies as st
from property_examples import examples
from wire_ends import Ends, error_of, frame_as, refusing, running_agents
from wire_messages import (
    OBSERVATION_SPACE,
    TOKEN,
    agent_rows,
    agent_step,
    agents_hello,
    first_agent_rows,
    first_rows,
    hello,
    rows,
)

from rollflow.nodes.env.lane_envs import AgentLaneMaker
from rollflow.nodes.env.observation_check import Deviations
from rollflow.nodes.env.remote.env_host import HostLane
from rollflow.stream.data.errors import WireError
from rollflow.stream.data.infos import SlotInfos
from rollflow.stream.data.space import describe_space
from rollflow.stream.wire import AgentForm, AgentRows, Reset, Rows, Step
from rollflow.stream.wire.codec.rows import RowForm
from rollflow.stream.wire.session import AgentTurns, GatewaySession

ONE, SEVERAL = RowForm.of(hello()), AgentForm.of(agents_hello())
RESET = Reset(0, 1, None, None)
NAN = float("nan")
INT = np.array


def checked(answer: Any, form: Any = None) -> Any:
    form = form or (ONE if isinstance(answer, Rows) else SEVERAL)
    step = Step(0, 2, INT([0, 1])) if isinstance(answer, Rows) else agent_step()
    return form.check_rows(answer, RESET if answer.number == 1 else step, 2)


def test_a_form_knows_agents_and_spaces_of_every_part() -> None:
    assert (SEVERAL.agents, SEVERAL.sizes) == (("red", "blue", 7), (2, 1))
    assert SEVERAL.observation_spaces == (spaces.Box(-1.0, 1.0, (2,), np.float32), spaces.Discrete(4))
    assert SEVERAL.action_spaces == (spaces.Discrete(3), spaces.Discrete(2))


def test_answers_that_fit_are_taken() -> None:
    assert checked(rows()).final_slots == (1,)
    taken = checked(agent_rows())
    assert [None if slots is None else slots.tolist() for slots in taken.agent_slots] == [[0, 1, 2], [1]]
    assert checked(first_rows()).rewards is checked(first_agent_rows()).rewards is None


def test_all_slots_of_a_part_by_number_are_all() -> None:
    assert checked(first_agent_rows(agent_slots=(np.arange(4), INT([1])))).agent_slots[0] is None
    asked = SEVERAL.check_request(agent_step(agent_slots=(np.arange(4), INT([1]))), 2)
    assert isinstance(asked, Step)
    assert asked.agent_slots is not None
    assert asked.agent_slots[0] is None


BOXES = describe_space(spaces.Tuple([OBSERVATION_SPACE, OBSERVATION_SPACE]))


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"agents": None}, r"hello.agents is None and hello.parts \(0, 0, 1\), expected every agent, and its part"),
        ({"parts": (0, 0)}, "expected every agent, and its part"),
        ({"agents": ("red", "red", 7)}, "hello.agents is .*, expected each agent once, and none named '__all__'"),
        ({"agents": ("red", "__all__", 7)}, "expected each agent once, and none named '__all__'"),
        ({"parts": (0, 0, 0)}, r"hello.parts is \[0, 0, 0\], expected 0 to 1, numbered as their first agents come"),
        ({"parts": (1, 0, 0)}, "expected 0 to 1, numbered as their first agents come"),
        ({"parts": (0, 1, 2)}, "expected 0 to 1, numbered as their first agents come"),
        (
            {"observation_space": describe_space(OBSERVATION_SPACE)},
            "hello.observation_space is Box.*, expected a Tuple",
        ),
        ({"action_space": {"kind": "Tuple", "parts": []}}, "hello.action_space is Tuple.*, expected a Tuple of the"),
        (
            {"action_space": describe_space(spaces.Tuple([spaces.Discrete(2)]))},
            "hello.action_space of 1 parts, expected 2, as hello.observation_space has",
        ),
        ({"observation_space": {"kind": "Graph"}}, "hello.observation_space is .*, expected a space"),
        (
            {"observation_space": BOXES, "action_space": BOXES},
            "hello: parts 0 and 1 have the same spaces, expected one",
        ),
        ({"autoreset": "NEXT_STEP"}, "hello.autoreset is NEXT_STEP, expected SAME_STEP for several agents"),
        ({"slots": (1, 1 << 19)}, "hello: 524289 environments of 3 agents, expected at most 1048576 in all"),
    ],
)
def test_agents_that_do_not_go_with_their_spaces_are_refused(changed: dict[str, Any], told: str) -> None:
    with refusing("spaces", told):
        AgentForm.of(agents_hello(**changed))


# What is changed in an answer to a step, and what is said of it.
WRONG_ROWS: list[tuple[dict[str, Any], str]] = [
    ({"obs": np.zeros((2, 4), np.float32)}, r"obs is an array <f4\[2, 4\], expected an array <f4\[2, 3\]"),
    ({"obs": np.zeros((2, 3))}, r"obs is an array <f8\[2, 3\], expected an array <f4\[2, 3\]"),
    ({"obs": np.zeros((3, 3), np.float32)}, r".*, expected an array <f4\[2, 3\]"),
    ({"obs": {"a": np.zeros((2, 3), np.float32)}}, r"obs is {'a': .*, expected an array <f4\[2, 3\]"),
    ({"obs": np.array([[0, 0, 0], [0, NAN, 0]], np.float32)}, r"obs of slot 1 has a NaN, expected numbers"),
    ({"final_obs": np.array([[0, NAN, 0]], np.float32)}, r"final_obs of slot 1 has a NaN"),
    ({"rewards": np.array([0.0, np.inf])}, "the reward of slot 1 is inf, expected a finite number"),
    ({"rewards": np.array([NAN, 0.0])}, "the reward of slot 0 is nan, expected a finite number"),
    ({"rewards": np.zeros(3)}, r"rewards is an array <f8\[3\], expected 2 numbers"),
    ({"truncateds": None}, "truncateds is nil, expected 2 numbers"),
    ({"rewards": np.array([NAN, 0.0]), "terminateds": None}, "terminateds is nil, expected 2 numbers"),
    (
        {"rewards": np.array([NAN, 0.0]), "truncateds": np.zeros(3, bool)},
        r"truncateds is an array \|b1\[3\], expected 2 numbers",
    ),
    ({"final_slots": ()}, r"final_slots is \[\], expected \[1\]: under SAME_STEP, every slot that ended"),
    ({"final_slots": (0, 1)}, r"final_slots is \[0, 1\], expected \[1\]"),
    ({"final_obs": None}, r"final_obs is None, expected the last observations of slots \[1\]"),
    ({"final_obs": np.zeros((2, 3), np.float32)}, r"final_obs is .*, expected an array <f4\[1, 3\]"),
    ({"infos": {"x": np.zeros(2), "_x": np.ones(1, bool)}}, r"infos\['_x'\] is .*, expected an array \|b1\[2\]"),
    ({"infos": {"x": {}, "_x": {}}}, r"infos\['_x'\] is {}, expected an array \|b1\[2\]"),
    ({"infos": {"x": {"y": 1, "_y": 1}}}, r"infos\['x'\]\['_y'\] is 1, expected an array"),
    ({"infos": {"x": {3: 1}}}, r"infos\['x'\] has the key 3, expected strings"),
    ({"final_infos": SlotInfos([{}])}, "final_infos of 1 slots, expected 2"),
]
ALL, ONE_PART = (None, None), (INT([0, 1, 2]),)
WRONG_AGENT_ROWS: list[tuple[dict[str, Any], str]] = [
    ({"agent_slots": ONE_PART}, r"agent_slots is .*, expected a list of 2 parts"),
    (
        {"agent_slots": (INT([0, 2, 1]), INT([1]))},
        r"obs\[0\]: its agent slots are \[0, 2, 1\], expected some of 0 to 3",
    ),
    ({"agent_slots": (INT([0, 1, 1]), INT([1]))}, r".* are \[0, 1, 1\], expected some of 0 to 3, ascending"),
    ({"agent_slots": (INT([-1, 1, 2]), INT([1]))}, r".* are \[-1, 1, 2\], expected some of 0 to 3, ascending"),
    ({"agent_slots": (INT([0, 1, 2]), INT([2]))}, r"obs\[1\]: its agent slots are \[2\], expected some of 0 to 1"),
    ({"agent_slots": ALL}, r"obs\[0\] is an array <f4\[3, 2\], expected an array <f4\[4, 2\]"),
    ({"obs": (np.zeros((3, 2)), INT([3]))}, r"obs\[0\] is an array <f8\[3, 2\], expected an array <f4\[3, 2\]"),
    ({"obs": (np.zeros((3, 2), np.float32), INT([[3]]))}, r"obs\[1\] is .*, expected an array <i8\[1\]"),
    ({"obs": (np.zeros((3, 2), np.float32),)}, "obs is .*, expected a list of 2 parts"),
    (
        {"obs": (INT([[0, 0], [0, 0], [NAN, 0]]).astype(np.float32), INT([3]))},
        r"obs\[0\] of agent slot 2 has a NaN, expected numbers",
    ),
    ({"rewards": None}, "rewards is nil, expected arrays of 4, 2 numbers"),
    ({"rewards": (np.zeros(4, np.float32),)}, "rewards is .*, expected arrays of 4, 2 numbers"),
    (
        {"rewards": (np.full(4, NAN, np.float32), np.zeros(2, np.float32)), "terminateds": None},
        "terminateds is nil, expected arrays of 4, 2 numbers",
    ),
    ({"truncateds": (np.zeros(4, bool), np.zeros(1, bool))}, "truncateds is .*, expected arrays of 4, 2 numbers"),
    (
        {"rewards": (INT([0, 0, 0, np.inf], np.float32), np.zeros(2, np.float32))},
        "the reward of agent slot 3 of part 0 is inf, expected a finite number",
    ),
    ({"ended": None}, "ended is None and ended_truncated an array .*, expected arrays of them"),
    ({"ended": INT([2])}, r"ended are \[2\], expected some of 0 to 1, ascending"),
    ({"ended": INT([1, 0]), "ended_truncated": INT([True, True])}, r"ended are \[1, 0\], expected some"),
    ({"ended_truncated": INT([True, True])}, r"ended_truncated is an array \|b1\[2\], expected 1 numbers"),
    ({"first_obs": None}, "first_obs is None, expected first observations, as episodes ended"),
    ({"first_agent_slots": None}, "first_agent_slots is None, expected first observations, as episodes ended"),
    (
        {"ended": INT([], np.int64), "ended_truncated": INT([], bool)},
        "first_agent_slots is .*, expected nil, as no episode ended",
    ),
    ({"first_agent_slots": ALL}, r"first_obs\[0\] is an array <f4\[2, 2\], expected an array <f4\[4, 2\]"),
    ({"first_agent_slots": ONE_PART}, "first_agent_slots is .*, expected a list of 2 parts"),
    (
        {"first_obs": (np.full((2, 2), NAN, np.float32), np.zeros(0, np.int64))},
        r"first_obs\[0\] of agent slot 0 has a NaN",
    ),
    ({"infos": ([],)}, "infos of 1 environments, expected 2, or none"),
    ({"infos": ([[3, {}]], [])}, r"infos of agents \[3\], expected each once, of 0 to 2"),
    ({"infos": ([[1, {}], [1, {}]], [])}, r"infos of agents \[1, 1\], expected each once, of 0 to 2"),
    ({"first_infos": ([], [])}, "first_infos of 2 environments, expected 1, or none"),
]


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        *((rows(**changed), told.replace("{", r"\{").replace("}", r"\}")) for changed, told in WRONG_ROWS),
        *((agent_rows(**changed), told) for changed, told in WRONG_AGENT_ROWS),
    ],
)
def test_answers_that_do_not_fit_are_refused_with_lane_step_and_slot(answer: Any, told: str) -> None:
    with refusing("rows", "step 2 of lane 0: " + told):
        checked(answer)


@pytest.mark.parametrize(
    "answer",
    [
        first_rows(rewards=np.zeros(2)),
        first_rows(terminateds=np.zeros(2, bool)),
        *(
            first_agent_rows(**{name: getattr(agent_rows(), name)})
            for name in ("rewards", "terminateds", "truncateds", "ended", "first_obs")
        ),
    ],
)
def test_the_answer_to_a_reset_has_nothing_of_a_step(answer: Any) -> None:
    with pytest.raises(WireError, match=r"reset 1 of lane 0: .* is .*, expected nil"):
        checked(answer)


@pytest.mark.parametrize(
    ("form", "request_", "told"),
    [
        (ONE, Step(0, 2, INT([0, 1]), (None,)), r"step 2 of lane 0: agent_slots is \(None,\), expected none"),
        (ONE, Step(0, 2, np.zeros(2)), r"step 2 of lane 0: actions is an array <f8\[2\], expected an array <i8\[2\]"),
        (ONE, Step(0, 2, np.zeros(3, np.int64)), r"expected an array <i8\[2\]"),
        (ONE, Reset(0, 1, (1, 2, 3), None), "reset 1 of lane 0: 3 seeds, expected 2 or none"),
        (SEVERAL, agent_step(agent_slots=None), "step 2 of lane 0: agent_slots is None, expected a list of 2 parts"),
        (SEVERAL, agent_step(actions=INT([0, 1])), r"actions is an array <i8\[2\], expected a list of 2 parts"),
        (
            SEVERAL,
            agent_step(agent_slots=(None, INT([2]))),
            r"actions\[1\]: its agent slots are \[2\], expected some of 0 to 1",
        ),
        (
            SEVERAL,
            agent_step(actions=[np.zeros(4), INT([1])]),
            r"actions\[0\] is an array <f8\[4\], expected an array <i8\[4\]",
        ),
        (SEVERAL, Reset(0, 1, (1, 2, 3), None), "reset 1 of lane 0: 3 seeds, expected 2 or none"),
        (SEVERAL, Reset(0, 1, None, {"at": 1}), "reset 1 of lane 0: options is {'at': 1}, expected nil"),
    ],
)
def test_a_request_that_does_not_fit_is_refused(form: Any, request_: Reset | Step, told: str) -> None:
    with refusing("request", told):
        form.check_request(request_, 2)


def test_an_episode_that_ended_keeps_its_last_observation_under_next_step() -> None:
    form = RowForm.of(hello(autoreset="NEXT_STEP"))
    assert checked(rows(final_slots=(), final_obs=None), form).final_obs is None
    with pytest.raises(WireError, match=r"final_slots is \[1\], expected \[\]: under NEXT_STEP, no slot"):
        checked(rows(), form)


def test_infinite_observations_are_numbers() -> None:
    assert checked(rows(obs=np.full((2, 3), -np.inf, np.float32))).obs[0, 0] == -np.inf


def test_nested_observations_have_tuples_and_maps_where_their_space_has_them() -> None:
    space = spaces.Dict({"at": spaces.Tuple([spaces.Discrete(3), spaces.Box(0, 1, (2,), np.float64)])})
    form = RowForm.of(hello(observation_space=describe_space(space)))
    obs = {"at": [np.array([1, 2]), np.zeros((2, 2))]}
    assert isinstance(checked(first_rows(obs=obs), form).obs["at"], tuple)
    obs["at"][1][1, 1] = NAN
    with pytest.raises(WireError, match=r"obs\['at'\]\[1\] of slot 1 has a NaN"):
        checked(first_rows(obs=obs), form)
    for wrong in ({"at": obs["at"][:1]}, {"at": obs["at"][0]}, {}, {"at": obs["at"], "b": 1}):
        with pytest.raises(WireError, match=r"expected a (list of 2 parts|map of 'at')"):
            checked(first_rows(obs=wrong), form)


def stepping() -> Ends:
    """Both ends, where a step has been asked for."""
    ends = running_agents()
    ends.to_gateway()
    ends.gateway.ask(agent_step())
    return ends


def test_a_step_and_its_answer_cross_the_wire() -> None:
    ends = stepping()
    (request,) = ends.to_host()
    assert isinstance(request, Step)
    with pytest.raises(WireError, match="rows 2 of lane 0, expected agent_rows or failed 2 of lane 0"):
        ends.host.answer(request, rows())
    ends.host.answer(request, agent_rows())
    (answer,) = ends.to_gateway()
    assert isinstance(answer, AgentRows)
    assert answer.infos == ([[0, {"won": True}]], [])


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (rows(), "rows 2 of lane 0, expected agent_rows or failed 2 of lane 0, the answer to step"),
        (agent_rows(obs=(np.zeros((3, 2), np.float32), INT([1, 2]))), r"step 2 of lane 0: obs\[1\] is"),
        (agent_rows(ended=INT([1])), r"step 2 of lane 0: ended is \[1\], expected \[0\], in which no agent is left"),
    ],
)
def test_a_gateway_refuses_what_does_not_fit(answer: Any, told: str) -> None:
    ends = stepping()
    ends.to_host()
    with pytest.raises(WireError, match=told):
        raise error_of(ends.gateway.receive(frame_as(answer), 0.0))


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
    told = "reset 1 of lane 1: environment 3, reset: its episode goes on, but no agent has"
    with pytest.raises(WireError, match=told):
        turns.take(first_agent_rows(lane=1, agent_slots=(INT([0, 1]), INT([], np.int64))))


def test_a_reset_begins_everything_anew() -> None:
    turns = begun()
    turns.take(none_ended(terminateds=flags(0, 2)))
    turns.take(first_agent_rows(number=3))
    turns.take(agent_rows(number=4))
