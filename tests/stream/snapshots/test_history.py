"""What looks at a run have seen of it: worked by hand."""

from typing import Any

from rollflow.stream.snapshots.history import RunHistory
from rollflow.stream.snapshots.rates import with_rates


def run(*, busy: float = 0.25, parties: tuple[tuple[str, str, float], ...] = (), **figures: float) -> dict[str, Any]:
    node = {"items": 1, "busy_s": busy, "idle_s": 1.0 - busy, "blocked_s": 0.0}
    said = [{"name": name, "kind": kind, "age_s": age_s} for name, kind, age_s in parties]
    counted = {"figures": figures} if figures else {}
    return with_rates({"elapsed_s": 1.0, "nodes": {"env": node}, "parties": said, **counted}, None)


def figures(mean: float) -> dict[str, float]:
    return {"rollout/ep_rew_mean": mean, "time/total_timesteps": 8, "time/time_elapsed": 2.0}


def test_figures_and_shares_are_kept_with_the_time_of_the_look_for_an_hour() -> None:
    history = RunHistory()
    history.add(run(busy=0.25, **figures(1.0)), 0.0)
    history.add(run(busy=0.5, **figures(2.0)), 3600.0)
    assert list(history.figures["return"]) == [(0.0, 1.0), (3600.0, 2.0)]
    assert list(history.figures["steps/s"]) == [(0.0, 4.0), (3600.0, 4.0)]
    assert list(history.busy["env"]) == [(0.0, 0.25), (3600.0, 0.5)]
    history.add(run(), 3601.0)
    assert list(history.figures["return"]) == [(3600.0, 2.0)]
    assert list(history.busy["env"]) == [(3600.0, 0.5), (3601.0, 0.25)]


def test_a_call_that_goes_on_grows_and_the_next_one_is_another() -> None:
    history = RunHistory()
    history.add(run(parties=(("env (lane 0)", "call", 0.5), ("credits", "waits", 9.0))), 10.0)
    history.add(run(parties=(("env (lane 0)", "call", 1.5),)), 11.0)
    history.add(run(parties=(("env (lane 0)", "call", 0.25), ("the reader", "works", 0.0))), 12.0)
    assert {name: list(calls) for name, calls in history.calls.items()} == {
        "env (lane 0)": [(9.5, 11.0), (11.75, 12.0)],
        "the reader": [(12.0, 12.0)],
    }
    history.add(run(), 3611.5)  # a call is forgotten an hour after its end
    assert list(history.calls["env (lane 0)"]) == [(11.75, 12.0)]
    history.add(run(), 3613.0)
    assert history.calls == {}
