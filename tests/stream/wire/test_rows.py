"""Answers of a host, held against its spaces and against what it was asked."""

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from wire_messages import first_rows, hello, rows

from rollflow.stream.data.errors import WireError
from rollflow.stream.data.infos import SlotInfos
from rollflow.stream.data.space import describe_space
from rollflow.stream.wire import Reset, RowForm, Rows, Step

FORM = RowForm.of(hello())
STEP = Step(0, 2, np.array([0, 1]))
RESET = Reset(0, 1, None, None)
NAN = float("nan")


def checked(answer: Rows, form: RowForm = FORM) -> Rows:
    return form.check_rows(answer, RESET if answer.rewards is None else STEP, 2)


def test_rows_that_fit_are_taken() -> None:
    assert checked(rows()).final_slots == (1,)
    assert checked(first_rows()).rewards is None


@pytest.mark.parametrize(
    ("changed", "told"),
    [
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
        ({"final_slots": ()}, r"final_slots is \[\], expected \[1\]: under SAME_STEP, every slot that ended"),
        ({"final_slots": (0, 1)}, r"final_slots is \[0, 1\], expected \[1\]"),
        ({"final_obs": None}, r"final_obs is None, expected the last observations of slots \[1\]"),
        ({"final_obs": np.zeros((2, 3), np.float32)}, r"final_obs is .*, expected an array <f4\[1, 3\]"),
        ({"infos": {"x": np.zeros(2), "_x": np.ones(1, bool)}}, r"infos\['_x'\] is .*, expected an array \|b1\[2\]"),
        ({"infos": {"x": {}, "_x": {}}}, r"infos\['_x'\] is {}, expected an array \|b1\[2\]"),
        ({"infos": {"x": {"y": 1, "_y": 1}}}, r"infos\['x'\]\['_y'\] is 1, expected an array"),
        ({"infos": {"x": {3: 1}}}, r"infos\['x'\] has the key 3, expected strings"),
        ({"final_infos": SlotInfos([{}])}, "final_infos of 1 slots, expected 2"),
    ],
)
def test_rows_that_do_not_fit_are_refused_with_lane_step_and_slot(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(WireError, match="step 2 of lane 0: " + told.replace("{", r"\{").replace("}", r"\}")) as caught:
        checked(rows(**changed))
    assert caught.value.code == "rows"


@pytest.mark.parametrize("changed", [{"rewards": np.zeros(2)}, {"terminateds": np.zeros(2, bool)}])
def test_the_answer_to_a_reset_has_no_rewards_and_no_ends(changed: dict[str, Any]) -> None:
    with pytest.raises(WireError, match=r"reset 1 of lane 0: .* is an array .*, expected nil"):
        FORM.check_rows(first_rows(**changed), RESET, 2)


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


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        (Step(0, 2, np.zeros(2)), r"step 2 of lane 0: actions is an array <f8\[2\], expected an array <i8\[2\]"),
        (Step(0, 2, np.zeros(3, np.int64)), r"expected an array <i8\[2\]"),
        (Reset(0, 1, (1, 2, 3), None), "reset 1 of lane 0: 3 seeds, expected 2 or none"),
    ],
)
def test_a_request_that_does_not_fit_is_refused(request_: Reset | Step, told: str) -> None:
    with pytest.raises(WireError, match=told) as caught:
        FORM.check_request(request_, 2)
    assert caught.value.code == "request"
