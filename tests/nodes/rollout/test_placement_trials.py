"""Places that may be about as fast are tried, with what was asked for; what they make decides."""

import multiprocessing
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from idle_env import Given
from numbered_module import NumberedModule

from rollflow.nodes import NStepReturns, Rollout
from rollflow.nodes.rollout import placement_trials
from rollflow.nodes.rollout.placement_cost_model import PlacementChoice, PlacementRequest
from rollflow.nodes.rollout.placement_trials import TrialResult, TriedCosts, is_worth_while
from rollflow.nodes.rollout.simulation import Setting, simulate
from rollflow.nodes.rollout.step_costs import Machine, StepCosts

THREADS, PROCESSES = PlacementChoice("threads", 2, None, 2_000.0), PlacementChoice("processes", 2, 1, 4_000.0)


class OnlyInMainThread(Given):
    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if threading.current_thread() is not threading.main_thread():
            raise OSError("no window here")
        return super().step(action)


def running(env: Any, **options: Any) -> Any:
    """Makes rollouts, and keeps what they were asked to be."""
    made: list[dict[str, Any]] = []

    def make(**how: Any) -> Rollout:
        made.append(how)
        return Rollout(env, num_envs=4, module=NumberedModule(), **options, **how)

    return make, made


@pytest.fixture
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement_trials, "_ROUND_S", 0.01)


@pytest.mark.usefixtures("_short")
@pytest.mark.parametrize("prefetch", [0, 2])
def test_every_place_is_run_as_it_would_be(prefetch: int) -> None:
    make, made = running(Given, prefetch=prefetch)
    found, failed = placement_trials.race(
        [THREADS, PROCESSES], make, 4, PlacementRequest(fragment_length=16, prefetch=prefetch)
    )
    assert not failed
    assert [(choice.where, choice.lanes, choice.workers) for choice in found] == [
        ("threads", 2, None),
        ("processes", 2, 1),
    ]
    assert all(choice.steps_per_s not in (2_000.0, 4_000.0) for choice in found)
    assert [how["fragment_length"] for how in made] == [16, 16]


@pytest.mark.usefixtures("_short")
def test_fragments_are_no_longer_than_a_moment() -> None:
    make, made = running(Given)
    # 0.1 s a vector step
    placement_trials.race([PlacementChoice("inline", None, None, 40.0)], make, 4, PlacementRequest(fragment_length=16))
    assert [how["fragment_length"] for how in made] == [1]


@pytest.mark.usefixtures("_short")
def test_what_fails_where_it_is_tried_is_not_chosen_and_it_says_why() -> None:
    make, _ = running(OnlyInMainThread)
    found, failed = placement_trials.race(
        [PlacementChoice("inline", None, None, 100.0), THREADS], make, 4, PlacementRequest()
    )
    assert [choice.where for choice in found] == ["inline"]
    assert list(failed) == ["threads"]
    assert failed["threads"].startswith("tried, it raised OSError: no window here")


class OnlyOnce(Given):
    """Holds what there is once, until it is closed."""

    held = 0

    def __init__(self) -> None:
        if OnlyOnce.held == 4:  # one for each slot
            raise OSError("address already in use")
        OnlyOnce.held += 1

    def close(self) -> None:
        OnlyOnce.held -= 1


class ClosesBadly(Given):
    def close(self) -> None:
        raise OSError("closed already")


INLINE = PlacementChoice("inline", None, None, 1_000.0)


@pytest.mark.usefixtures("_short")
def test_what_can_not_be_beside_another_place_is_tried_by_itself() -> None:
    make, made = running(OnlyOnce)
    found, failed = placement_trials.race([INLINE, THREADS], make, 4, PlacementRequest())
    assert [choice.where for choice in found] == ["inline", "threads"]
    assert not failed
    assert [how["where"] for how in made] == ["inline", "threads", "threads"]
    assert OnlyOnce.held == 0


@pytest.mark.usefixtures("_short")
def test_an_error_in_closing_is_logged_and_what_was_made_counts(caplog: pytest.LogCaptureFixture) -> None:
    make, _ = running(ClosesBadly)
    found, failed = placement_trials.race([INLINE, THREADS], make, 4, PlacementRequest())
    assert [choice.where for choice in found] == ["inline", "threads"]
    assert not failed
    assert "closing what had been tried raised OSError: closed already" in caplog.text


@pytest.mark.usefixtures("_short")
def test_an_interrupt_ends_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(placement_trials.time, "sleep", interrupted)
    make, _ = running(Given)
    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        placement_trials.race([THREADS, PROCESSES], make, 4, PlacementRequest())
    assert set(threading.enumerate()) <= before
    assert not multiprocessing.active_children()


def test_slow_steps_slow_starts_and_single_places_are_not_tried() -> None:
    def measured(start_s: float) -> StepCosts:
        return StepCosts(4, lambda slots: 1e-3, 0.0, lambda slots: 1e-3, start_s)

    assert is_worth_while([THREADS, PROCESSES], measured(0.1))
    assert not is_worth_while([THREADS, PROCESSES], measured(1.0))
    assert not is_worth_while([THREADS], measured(0.1))
    assert not is_worth_while([PlacementChoice("threads", 4, None, 30.0), PROCESSES], measured(0.1))


def test_how_long_an_environment_takes_to_be_made_and_reset_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Given):
        def __init__(self) -> None:
            clock[0] += 3.0

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
            clock[0] += 4.0
            return super().reset()

    clock, told = [0.0], list[StepCosts]()
    perf_counter = time.perf_counter
    monkeypatch.setattr("rollflow.nodes.rollout.placement_probe.time.perf_counter", lambda: perf_counter() + clock[0])

    def asked(choices: Any, measured: StepCosts) -> bool:
        told.append(measured)
        return False

    monkeypatch.setattr("rollflow.nodes.rollout.placement.is_worth_while", asked)
    rollout = Rollout(Slow, num_envs=2, module=NumberedModule(), where="auto")
    rollout.environments.close()
    assert told[0].start_s >= 7.0


@pytest.mark.parametrize(
    ("made", "where"),
    [({"inline": 10.0, "threads": 50.0, "processes": 20.0}, "threads"), ({"inline": 10.0}, "inline"), ({}, "inline")],
    ids=str,
)
def test_what_is_made_decides(made: dict[str, float], where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[PlacementChoice] = []
    given: dict[str, Any] = {}
    how: dict[str, Any] = {"num_envs": 4, "prefetch": 3, "step_timeout": 9.0}

    def told(choices: Any, make: Any, slots: int, asked: PlacementRequest) -> placement_trials.TrialResult:
        tried.extend(choices)
        given.update(make.keywords)
        found = [PlacementChoice(place, 2, 1 if place == "processes" else None, rate) for place, rate in made.items()]
        return placement_trials.TrialResult(found, {"rollouts": "tried, it raised OSError: no"})

    monkeypatch.setattr("rollflow.nodes.rollout.placement.race", told)
    monkeypatch.setattr("rollflow.nodes.rollout.placement_cost_model._CLOSE", 0.0)
    rollout = Rollout(Given, module=NumberedModule(), where="auto", **how)
    rollout.environments.close()
    assert given.items() >= how.items() | {"max_batch": None, "max_wait": 0.0, "forward_in_thread": False}.items()
    assert [choice.where for choice in tried] == ["inline", "threads", "processes", "rollouts"]
    assert rollout.placement.startswith(f"where='{where}': a step of 4 environments takes ")
    assert "not where='rollouts': tried, it raised OSError: no" in rollout.placement
    assert f"; made steps/s: {next(iter(made), 'none')}" in rollout.placement


@pytest.mark.slow
def test_a_race_leaves_everything_as_it_was() -> None:
    torch.manual_seed(3)
    np.random.seed(3)
    before = str(torch.get_rng_state()), str(np.random.get_state())
    with Rollout("CartPole-v1", num_envs=64, where="auto", num_fragments=2, seed=0) as rollout:
        assert "; made steps/s: inline" in rollout.placement
        assert (str(torch.get_rng_state()), str(np.random.get_state())) == before
        assert len(list(rollout.fragments())) == 2 * rollout.environments.num_lanes


# Costs of workers

SLOW = Setting(where="processes", slots=64, lanes=8, workers=4, prefetch=1)


def worker_costs(monkeypatch: pytest.MonkeyPatch, runs: list[Any], rate: float | None) -> TriedCosts:
    """Those of short runs that make so many steps per second; None: nothing could be run."""

    def ran(choices: Any, make: Any, slots: int, request: Any) -> TrialResult:
        runs.append((*choices, slots, request))
        return TrialResult([] if rate is None else [replace(choices[0], steps_per_s=rate)], {})

    monkeypatch.setattr(placement_trials, "race", ran)
    return TriedCosts(Given, lambda: lambda *args, **options: None)


def costs(env: float = 5e-6) -> StepCosts:
    return StepCosts(64, lambda slots: env * slots, 0.0, lambda slots: 5e-5, machine=Machine(4))


def test_a_hand_over_costs_what_makes_a_simulation_as_fast_as_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Any] = []
    found = worker_costs(monkeypatch, runs, 20_000.0)
    for _ in range(2):  # it is run once
        of = found.measured(costs(), SLOW)
    [(choice, slots, _)] = runs
    assert (choice.where, choice.lanes, choice.workers, slots) == ("processes", 4, 2, 32)
    assert of.machine.to_process > 2 * Machine().hand_over  # type: ignore[operator]
    assert of.on(4, "threads").hand_over == Machine().hand_over
    small = replace(SLOW, slots=32, lanes=4, workers=2)
    assert simulate(of, small, of.on(4, small.where)).steps_per_s == pytest.approx(20_000, rel=0.03)


def test_a_vector_step_in_a_worker_takes_what_makes_a_simulation_as_fast_as_a_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs: list[Any] = []
    there = replace(SLOW, where="rollouts")
    of = worker_costs(monkeypatch, runs, 100_000.0).measured(costs(), there)
    [(choice, slots, _)] = runs
    assert (choice.where, choice.lanes, choice.workers, slots) == ("rollouts", 4, 2, 32)
    assert of.machine.in_worker > 1
    assert of.on(4, "processes").in_worker == of.on(4, "inline").in_worker == 1
    small = replace(there, slots=32, lanes=4, workers=2)
    assert simulate(of, small, of.on(4, small.where)).steps_per_s == pytest.approx(100_000, rel=0.03)


@pytest.mark.parametrize("releases", [1.0, 0.25], ids=["fragments", "batches"])
def test_a_fragment_of_a_rollout_in_a_thread_takes_what_makes_a_simulation_as_fast_as_a_run(
    releases: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[Any] = []
    there = replace(SLOW, where="inline", workers=1)
    of = replace(costs(), update_s=8e-3, update_rows=8192, update_releases=releases)
    found = worker_costs(monkeypatch, runs, 60_000.0).measured(of, there)
    [(choice, slots, request)] = runs
    assert (choice.where, choice.lanes, choice.workers, slots) == ("inline", 4, None, 32)
    assert request.makes_batches == (releases < 1)
    assert found.on(4, "inline").fragment > Machine().fragment
    assert found.on(4, "rollouts").fragment == found.on(4, "threads").fragment == Machine().fragment
    small, alone = (
        replace(there, slots=32, lanes=4),
        replace(found, update_s=8e-3 * (1 - releases), update_releases=0.0),
    )
    assert simulate(alone, small, found.on(4, "inline")).steps_per_s == pytest.approx(60_000, rel=0.03)


@pytest.mark.usefixtures("_short")
@pytest.mark.parametrize("makes_batches", [False, True])
def test_a_trial_takes_what_its_reader_takes(makes_batches: bool) -> None:
    make, _ = running(Given, prefetch=1)
    request, asked = PlacementRequest(prefetch=1, fragment_length=4, makes_batches=makes_batches), []
    batches, fragments = Rollout.batches, Rollout.fragments
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rollout, "batches", lambda self: asked.append("batches") or batches(self))
        patch.setattr(Rollout, "fragments", lambda self: asked.append("fragments") or fragments(self))
        made, failed = placement_trials.race([replace(THREADS, where="inline")], make, 4, request)
    assert failed == {}
    assert made[0].steps_per_s > 0
    assert asked[0] == ("batches" if makes_batches else "fragments")


def test_a_trial_has_the_learner_pieces_of_the_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bool] = []

    def seen(choices: Any, make: Any, slots: int, request: Any) -> TrialResult:
        found.append(make(where="inline", lanes=1, workers=None, fragment_length=4).has_learner_pieces)
        return TrialResult([], {})

    monkeypatch.setattr(placement_trials, "race", seen)
    pieces: dict[str, Any] = {"learner_connector": lambda obs_space, act_space: NStepReturns(gamma=0.9, n_step=2)}
    with Rollout(Given, module=NumberedModule(), num_envs=4, fragment_length=8, seed=0, **pieces) as rollout:
        next(rollout.batches())
        rollout.what_if(prefetch=1)
    assert found == [True]


def test_a_hand_over_that_can_not_be_run_costs_what_it_mostly_does(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker_costs(monkeypatch, [], None).measured(costs(), SLOW).machine == Machine(4)


@pytest.mark.parametrize(
    ("of", "setting"),
    [
        (costs(), replace(SLOW, where="threads")),
        (costs(), replace(SLOW, where="inline", prefetch=0)),
        (costs(env=1e-2), SLOW),
        (replace(costs(), start_s=10.0), SLOW),
    ],
    ids=["threads", "inline, none ahead", "long steps", "long starts"],
)
def test_nothing_is_run_where_that_takes_long_or_says_little(
    of: StepCosts, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[Any] = []
    assert worker_costs(monkeypatch, runs, 1.0).measured(of, setting) == of
    assert runs == []
