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
from rollflow.nodes.rollout.placement_cost_model import settings as worth_a_try
from rollflow.nodes.rollout.simulation import Setting, VirtualClock, simulate
from rollflow.nodes.rollout.step_costs import Machine, StepCosts


def measured(slots: int, env: float, rest: float, per_row: float = 0.0, waits: float = 0.0) -> StepCosts:
    def of_rest(count: int) -> float:
        return 60e-6 + rest + per_row * count

    return StepCosts(slots, lambda count: count * env, waits, of_rest, machine=Machine(beside=1.2))


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
    one = 64 / (64.11e-3 + 0.5e-3 / 128)  # half a millisecond for each fragment
    assert chosen(case, PlacementRequest(lanes=1)) == PlacementChoice("inline", 1, None, pytest.approx(one))
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


# What it costs to choose: about 3 µs for each event that is simulated


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every time when a simulated process went on."""
    happened: list[Any] = []
    advance = VirtualClock._advance

    def counted(clock: VirtualClock, process: Any) -> None:
        happened.append(clock.now)
        advance(clock, process)

    monkeypatch.setattr(VirtualClock, "_advance", counted)
    return happened


@pytest.mark.parametrize(
    ("case", "most"),
    [
        (measured(1024, 20e-6, 200e-6, 1e-6), 100_000),
        (measured(1024, 1e-3, 200e-6, 1e-6), 100_000),  # a step of all of them is cut into many slices
        (measured(1024, 1e-3, 200e-6, 1e-6, waits=0.99), 250_000),  # hundreds of lanes are of use
    ],
)
def test_a_choice_for_a_thousand_slots_simulates_a_few_events_for_each(
    case: StepCosts, most: int, events: list[Any]
) -> None:
    chosen(case)
    assert 1024 < len(events) < most


@pytest.mark.parametrize("where", ["threads", "processes", "rollouts"])
def test_a_round_of_a_thousand_lanes_has_a_few_steps_of_each(where: str, events: list[Any]) -> None:
    setting = Setting(where=where, slots=1024, lanes=1024, workers=2, prefetch=1)
    simulate(measured(1024, 20e-6, 200e-6), setting, Machine(2), steps=64)
    assert 1024 < len(events) < 50_000


@pytest.mark.parametrize(("slots", "lanes"), [(24, [2, 3, 6, 12, 24]), (64, [3]), (31, [31])])
def test_few_numbers_of_lanes_are_worth_a_try(slots: int, lanes: list[int]) -> None:
    asked = PlacementRequest(lanes=lanes[0] if slots == 64 else None)
    assert [each.lanes for each in worth_a_try(slots, "threads", asked, 3)] == lanes


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
