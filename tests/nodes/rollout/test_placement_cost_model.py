"""Cost model of placement: where a rollout goes, computed from the times of its parts."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollflow.nodes.rollout.placement_cost_model import (
    PlacementChoice,
    PlacementRequest,
    close,
    expected,
    explanation,
    fastest,
    refusals,
)
from rollflow.nodes.rollout.step_costs import StepCosts


def measured(slots: int, env: float, rest: float, per_row: float = 0.0, waits: float = 0.0) -> StepCosts:
    return StepCosts(slots, lambda count: count * env, waits, lambda count: 60e-6 + rest + per_row * count)


def choose(
    case: StepCosts, asked: PlacementRequest, cores: int, ruled_out: dict[str, str]
) -> tuple[PlacementChoice, str]:
    """By what is expected alone."""
    ruled_out = refusals(asked) | ruled_out
    choices = expected(case, asked, cores, ruled_out)
    best = fastest(choices)
    return best, explanation(best, case, {"expected steps/s": choices}, asked, ruled_out)


def chosen(case: StepCosts, asked: PlacementRequest | None = None, cores: int = 2, **ruled_out: str) -> PlacementChoice:
    return choose(case, asked or PlacementRequest(), cores, ruled_out)[0]


@pytest.mark.parametrize(
    ("case", "where", "lanes"),
    [
        (measured(64, 0.5e-6, 40e-6), "inline", None),  # cheap, and vectorized already
        (measured(1, 8e-6, 35e-6), "inline", None),
        (measured(8, 8e-6, 35e-6), "inline", None),  # cheap: handing over costs more
        (measured(64, 100e-6, 50e-6), "rollouts", 2),
        (measured(32, 50e-6, 300e-6, 140e-6), "rollouts", 2),  # pixels on processors
        (measured(16, 5e-3, 40e-6, waits=0.99), "threads", 16),  # waiting costs nothing
    ],
)
def test_the_place_follows_from_what_the_parts_take(case: StepCosts, where: str, lanes: int | None) -> None:
    choice, why = choose(case, PlacementRequest(), 2, {})
    assert (choice.where, choice.lanes) == (where, lanes)
    env, slots = case.env(case.slots) * 1e6, case.slots
    assert why.startswith(f"where='{where}': a step of {slots} environments takes {env:.0f} µs ({case.waits:.0%} of it")
    assert f"{choice} {choice.steps_per_s:,.0f}" in why


def test_more_cores_are_used_by_more_workers() -> None:
    choice = chosen(measured(64, 1e-3, 50e-6), cores=8)
    assert choice.workers is not None
    assert choice.workers >= 7  # one core may be kept for the forward pass


def test_one_core_keeps_what_does_not_wait_inline() -> None:
    assert chosen(measured(64, 1e-3, 50e-6), cores=1).where == "inline"


def test_a_place_that_is_ruled_out_is_not_chosen_and_it_says_why() -> None:
    case = measured(32, 500e-6, 300e-6)
    assert chosen(case, cores=8).where == "rollouts"
    choice, why = choose(case, PlacementRequest(), 8, {"rollouts": "the module acts on cuda:0"})
    assert (choice.where, choice.workers) == ("processes", 7)
    assert why.endswith("; not where='rollouts': the module acts on cuda:0")
    assert chosen(case, cores=8, rollouts="a", processes="b").where in ("inline", "threads")


def test_lanes_and_workers_that_were_asked_for_are_what_is_reckoned_with() -> None:
    case = measured(64, 1e-3, 50e-6)
    assert chosen(case, PlacementRequest(lanes=1)) == PlacementChoice("inline", 1, None, pytest.approx(64 / 64.11e-3))
    choice = chosen(case, PlacementRequest(lanes=8, workers=3), cores=4)
    assert (choice.lanes, choice.workers) == (8, 3)
    choice = chosen(case, PlacementRequest(lanes=2, workers=3), cores=4)
    assert (choice.lanes, choice.workers) == (2, 2)  # as many as have something to do


def test_workers_that_are_not_used_are_told_of() -> None:
    choice, why = choose(measured(1, 1e-6, 40e-6), PlacementRequest(workers=2), 2, {})
    assert choice.where == "inline"
    assert "; workers=2 is not used" in why


def test_lanes_fit_into_the_largest_forward_pass() -> None:
    asked = PlacementRequest(max_batch=4)
    assert chosen(measured(16, 1e-6, 40e-6), asked).lanes == 4
    assert chosen(measured(18, 1e-6, 40e-6), asked, cores=1).lanes == 5
    choice = chosen(measured(16, 5e-3, 1e-3, waits=0.99), asked, rollouts="no")
    assert choice.where == "threads"
    assert choice.lanes is not None
    assert 16 / choice.lanes <= 4


def test_short_fragments_are_dear_to_hand_over() -> None:
    case = measured(8, 20e-6, 40e-6)
    assert chosen(case, PlacementRequest(fragment_length=128)).where == "rollouts"
    assert chosen(case, PlacementRequest(fragment_length=2)).where == "inline"


def test_what_is_far_from_the_fastest_is_not_worth_a_try() -> None:
    made = [
        PlacementChoice("inline", None, None, 60.0),
        PlacementChoice("threads", 2, None, 40.0),
        PlacementChoice("rollouts", 2, 2, 100.0),
    ]
    assert [choice.where for choice in close(made)] == ["inline", "rollouts"]
    assert close(made[:1]) == made[:1]


@pytest.mark.parametrize(
    ("made", "where"),
    [
        ({"inline": 100, "rollouts": 104}, "inline"),  # not worth the workers
        ({"inline": 100, "rollouts": 106}, "rollouts"),
        ({"threads": 98, "processes": 100}, "threads"),  # as good
        ({"threads": 96, "processes": 100}, "processes"),
        ({"threads": 96}, "threads"),
    ],
)
def test_the_simplest_of_those_that_are_as_good_is_taken(made: dict[str, float], where: str) -> None:
    assert (
        fastest([PlacementChoice(place, None, None, steps_per_s) for place, steps_per_s in made.items()], 1.05).where
        == where
    )


optional = st.none() | st.integers(1, 20)


@settings(max_examples=25)  # each of which simulates dozens of settings
@given(
    case=st.builds(measured, st.integers(1, 24), *[st.floats(1e-7, 1e-1)] * 3, waits=st.floats(0, 1)),
    lanes=optional,
    workers=optional,
    max_batch=optional,
    cores=st.integers(1, 32),
    refused=st.sets(st.sampled_from(["processes", "rollouts"])),
)
def test_whatever_was_asked_for_is_kept(
    case: StepCosts, lanes: int | None, workers: int | None, max_batch: int | None, cores: int, refused: set[str]
) -> None:
    lanes = lanes and min(lanes, case.slots)
    choice, why = choose(case, PlacementRequest(lanes, workers, max_batch), cores, dict.fromkeys(refused, "it can't"))
    made: Any = choice.lanes or 1
    assert choice.where not in refused
    assert 1 <= made <= case.slots
    assert lanes in (None, choice.lanes)
    assert lanes is not None or max_batch is None or -(-case.slots // made) <= max_batch
    assert (choice.workers is None) == (choice.where in ("inline", "threads"))
    assert (choice.workers or 1) <= min(made, workers or cores)
    assert choice.steps_per_s > 0
    assert all(f"not where='{where}': it can't" in why for where in refused)
