"""Hosts in the trace of a rollout: their spans are on its time axis, however far their clocks are from its own."""

import threading
from pathlib import Path
from typing import Any, cast

import pytest
from numbered_module import NumberedModule
from remote_hosts import listening
from shifted_processes import shifted_host
from traces import Event, arrows, assert_valid, events_of, processes, tracks

from rollflow.nodes import EnvHost, RemoteEnvs, RemoteRollouts, Rollout, RolloutHost
from rollflow.nodes.env.remote.lane_work import LaneWork
from rollflow.stream.wire import Step, TraceRequest, Turn

AHEAD_S, BEHIND_S = 300, 30  # the clock of a machine may have begun just now
LANES, FRAGMENTS, LENGTH = 2, 3, 8
STAGES = ("env", "env_to_module", "module", "module_to_env")


def traced(path: Path, kind: Any, shift_s: int) -> list[Event]:
    remote: Any = listening(RemoteEnvs if kind is EnvHost else RemoteRollouts)
    options: dict[str, Any] = {"fragment_length": LENGTH, "num_fragments": FRAGMENTS, "seed": 0}
    with (
        shifted_host(remote.addresses[0], kind, shift_s),
        Rollout(remote, module=NumberedModule(), trace=str(path), **options) as rollout,
    ):
        assert len(list(rollout.batches())) == FRAGMENTS
    return events_of(path)


def clock_of(events: list[Event], process: str) -> dict[str, float]:
    """What the trace says of a process' clock: `offset_us`, `uncertainty_us`."""
    found: dict[str, float] = events[-1]["args"]["clocks"][process]
    *_, label = [event for event in events if event["name"] == "process_labels"]
    assert label["pid"] == processes(events)[process]
    assert f"{found['uncertainty_us']:.1f} µs" in label["args"]["labels"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("shift_s", [AHEAD_S, -BEHIND_S])
def test_a_host_of_environments_steps_within_the_steps_that_were_asked_for(tmp_path: Path, shift_s: int) -> None:
    events = traced(tmp_path / "run.trace", EnvHost, shift_s)
    assert_valid(events)
    _, host = processes(events)
    assert host.startswith("host sim (")
    clock = clock_of(events, host)
    assert abs(clock["offset_us"] + shift_s * 1e6) <= clock["uncertainty_us"]
    here, there = tracks(events), tracks(events, processes(events)[host])
    for lane in range(LANES):
        asked = [span for span in here[f"lane {lane}"] if span[2]["name"] in ("reset", "step")]
        made = there[f"lane {lane}"]
        assert [each["name"] for _, _, each in made] == ["reset"] + ["step"] * LENGTH * FRAGMENTS
        assert [each["name"] for _, _, each in asked] == [each["name"] for _, _, each in made]
        for (asked_at, answered_at, _), (begin, end, _) in zip(asked, made, strict=True):
            assert asked_at - clock["uncertainty_us"] * 1e3 <= begin <= end
            assert end <= answered_at + clock["uncertainty_us"] * 1e3
    _assert_whole_arrows(events, host, "reset", "step")


@pytest.mark.slow
def test_a_host_of_rollouts_has_its_stages_in_the_turns_that_were_asked_for(tmp_path: Path) -> None:
    events = traced(tmp_path / "run.trace.gz", RolloutHost, AHEAD_S)
    assert_valid(events)
    _, host = processes(events)
    uncertainty_ns = clock_of(events, host)["uncertainty_us"] * 1e3
    here, there = tracks(events), tracks(events, processes(events)[host])
    for lane in range(LANES):
        turns = [(begin, end) for begin, end, each in here[f"lane {lane}"] if each["name"] == "rollout"]
        assert len(turns) == FRAGMENTS
        made = there[f"lane {lane}"]
        assert {each["name"] for _, _, each in made} == set(STAGES)
        assert [each["name"] for _, _, each in made].count("module") == LENGTH * FRAGMENTS
        for begin, end, _ in made:
            assert any(
                asked - uncertainty_ns <= begin and end <= answered + uncertainty_ns for asked, answered in turns
            )
    _assert_whole_arrows(events, host, *STAGES)


def _assert_whole_arrows(events: list[Event], host: str, *first: str) -> None:
    """Every fragment's arrow leads from its first step on the host over its span here to its update."""
    program = next(iter(processes(events)))
    found = sorted(arrows(events), key=lambda stops: (stops[0][1], stops[-1][2]))
    assert len(found) == LANES * FRAGMENTS
    for number, (begins, comes_by, ends) in enumerate(found):
        lane, sequence = divmod(number, FRAGMENTS)
        assert begins[:2] == (host, f"lane {lane}")
        assert begins[2] in first
        assert comes_by[:2] == (program, f"lane {lane}")
        assert ends == (program, "caller", f"update {sequence}")


@pytest.mark.parametrize("is_rollout", [False, True], ids=["env", "rollout"])
def test_a_step_that_outlives_its_rollout_is_not_in_the_trace_of_the_next_one(is_rollout: bool) -> None:
    ended, is_over = threading.Semaphore(0), threading.Event()
    work = LaneWork([cast(Any, None)], threading.RLock(), lambda request, error: None, ended.release)

    def begin(lane: int) -> None:
        work.grant([lane])
        work.spans.answer(TraceRequest(1, True), 0)
        request = Turn(lane, 1) if is_rollout else Step(lane, 1, None)
        recorder_of = work.spans.recorder_of(lane)

        def step() -> None:
            assert is_over.wait(30)
            if is_rollout and recorder_of is not None:
                recorder_of("env")(1, 2)

        work.begin(cast(Any, None), request, lambda lane, request: step)

    begin(4)
    work.begin_anew()
    begin(7)
    is_over.set()
    for _ in range(2):
        assert ended.acquire(timeout=30)
    assert set(work.spans.answer(TraceRequest(2, True), 0).lanes.tolist()) == {7}
