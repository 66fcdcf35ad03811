"""Hosts of several agents' environments that are killed, cut off, hang, raise, leave and come."""

import gc
import logging
import os
import random
import signal
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from agent_logs import steps_of
from ending_agent_envs import DoomedAgents, logs_of
from hypothesis import Phase, given, settings, strategies as st
from lane_clock import LaneClock
from leftovers import nothing_left
from lost_agents import check_laws, not_emitted
from property_examples import examples
from remote_agents import HASTY, makers, reasons_of, rollout_over, slots_of, taken_until, told
from remote_hosts import BrokenWire, HostProcess, hosting, listening
from serial_module import SerialModule
from stalled_rollouts import stalling

from rollflow import ConnectorV2, MultiAgentRollout


@pytest.fixture(autouse=True)
def _short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollflow.stream.net.backoff.FIRST_S", 0.01)


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, 21])
def test_a_host_that_is_killed_ends_its_own_episodes_and_no_others(step: int, tmp_path: Path) -> None:
    envs = listening(hosts=2, limits=HASTY)
    doomed = told(tmp_path, 0, 1, fate="kill", step=step, lives=9, length=200)
    victim = HostProcess(envs.addresses[0], doomed, name="victim", env=DoomedAgents)
    try:
        with hosting(envs.addresses[0], makers(tmp_path, 2, 3)), rollout_over(envs) as rollout:
            fragments = iter(rollout.fragments())
            taken = taken_until(fragments, lambda taken: len(taken) > 12)
            rollout.drain()
            taken += list(fragments)
            check_laws(rollout, taken, tmp_path, 4)
    finally:
        victim.end()
    reasons = reasons_of(taken)
    assert bool(reasons) == bool(step % 8)  # what ended with a fragment has been handed out
    assert all("victim" in reason and "not back within 0.5 s" in reason for reason in reasons)


@pytest.mark.slow
@given(
    fate=st.sampled_from(["raise", "wrong"]),
    step=st.integers(0, 20),
    lives=st.integers(1, 3),
    cuts=st.lists(st.integers(1, 6000), max_size=10),
    fragment_length=st.integers(1, 9),
    length=st.sampled_from([3, 50]),
    lanes=st.integers(1, 3),
    prefetch=st.integers(0, 1),
    at_once=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=examples(12), phases=[Phase.explicit, Phase.generate])
def test_every_agent_step_of_a_lost_environment_is_in_a_chunk_or_counted(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], lanes: int, **drawn: Any
) -> None:
    folder, envs = tmp_path_factory.mktemp("log"), listening()
    kinds = {name: drawn.pop(name) for name in ("length", "at_once")}
    if lanes == 1:  # an only lane that fails before its first step ends the run
        drawn["step"] = max(1, drawn["step"])
    doomed = makers(folder, 0, **{name: drawn.pop(name) for name in ("fate", "step", "lives")}, **kinds)
    wire = BrokenWire(envs.addresses[0], lambda: cuts.pop() if cuts else None)
    try:
        with (
            hosting(wire.address, [*doomed, *makers(folder, 1, 2, **kinds)], lanes=lanes),
            rollout_over(envs, num_fragments=20, **drawn) as rollout,
        ):
            fragments = list(rollout.fragments())
            check_laws(rollout, fragments, folder, 3)
    finally:
        wire.close()
    assert sorted({fragment.lane for fragment in fragments}) == list(range(lanes))


@pytest.mark.slow
def test_a_connection_that_is_cut_hundreds_of_times_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollflow.stream.net.backoff.FIRST_S", 0.001)
    rng, envs = random.Random(0), listening()
    wire = BrokenWire(envs.addresses[0], lambda: rng.randrange(1, 6000))
    logging.getLogger("rollflow").setLevel(logging.ERROR)
    try:
        with hosting(wire.address, makers(tmp_path, 0, 1, 2), lanes=2), rollout_over(envs) as rollout:
            fragments = iter(rollout.fragments())
            taken = taken_until(fragments, lambda taken: wire.cuts >= 300)
            rollout.drain()
            taken += list(fragments)
            check_laws(rollout, taken, tmp_path, 3)
            assert reasons_of(taken) == [] or "the rollout ended" in reasons_of(taken)[0]
    finally:
        wire.close()
        logging.getLogger("rollflow").setLevel(logging.NOTSET)


@pytest.mark.parametrize(
    ("fate", "why"),
    [
        ("raise", "RuntimeError: it broke (environment 1, env step 5)"),
        ("wrong", "EnvError: environment 1, env step 5, agent 'nobody': observations has it, but it is not in"),
    ],
)
def test_what_is_open_ends_as_truncated_and_says_why(tmp_path: Path, fate: str, why: str) -> None:
    envs, kinds = listening(), {"agents": 2, "at_once": True}
    doomed = makers(tmp_path, 1, fate=fate, step=5, lives=1, **kinds)
    with (
        hosting(envs.addresses[0], [*makers(tmp_path, 0, **kinds), *doomed], name="sim"),
        rollout_over(envs, num_fragments=2, seed=4) as rollout,
    ):
        fragments = list(rollout.fragments())
        assert rollout.lost == {"workers": 4}
        check_laws(rollout, fragments, tmp_path, 2)
    [loss] = [loss for fragment in fragments for loss in fragment.losses]
    assert loss[0] == 5
    assert loss[1].startswith("host sim (tcp://127.0.0.1:")
    assert why in loss[1]
    lost = [episode for fragment in fragments for episode in fragment.episodes() if "lost" in episode.custom_data]
    assert lost
    for episode in lost:
        assert all(each.custom_data["lost"] == loss[1] for each in episode.agent_episodes.values())
        assert [each.is_truncated for each in episode.agent_episodes.values()] == [True, True]


@contextmanager
def released_once_lost(rollout: MultiAgentRollout, folder: Path, clock: LaneClock) -> Iterator[threading.Thread]:
    """A thread that has time go on when the simulator 0 is held, and lets it go once its step is given up.

    It does so too where the test fails before that.
    """
    is_over, go = threading.Event(), folder / "go 0"

    def release() -> None:
        while not ((folder / "held 0").exists() or is_over.wait(0.01)):
            pass
        clock.go_on(rollout, 0.4)
        while not rollout.lost and not is_over.wait(0.01):
            pass
        go.touch()

    releasing = threading.Thread(target=release)
    releasing.start()
    try:
        yield releasing
    finally:
        is_over.set()
        releasing.join()


def test_a_hung_simulator_is_named_and_its_episodes_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = LaneClock(monkeypatch)
    envs = listening()
    hangs = makers(tmp_path, 0, fate="hold", step=20, lives=1, length=50)
    with (
        hosting(envs.addresses[0], [*hangs, *makers(tmp_path, 1)], lanes=2, name="sim"),
        rollout_over(envs, step_timeout=0.3) as rollout,
        released_once_lost(rollout, tmp_path, clock) as releasing,
    ):
        fragments = iter(rollout.fragments())
        taken = taken_until(fragments, lambda taken: bool(rollout.lost) and any(f.losses for f in taken))
        releasing.join()
        taken += taken_until(fragments, lambda taken: 0 in slots_of(taken))
        rollout.drain()
        taken += list(fragments)
    reasons = reasons_of(taken)
    assert any("host sim (tcp://127.0.0.1:" in reason for reason in reasons)
    assert any("slot 0: no answer to a step within 0.3 s" in reason for reason in reasons)
    of_other = [fragment for fragment in taken if fragment.lane == 1]
    assert not_emitted(of_other, logs_of(tmp_path, 1)) <= rollout.lost["workers"]


JOINTLY: Any = pytest.mark.parametrize(
    "options", [{}, {"max_batch": 8}, {"max_batch": 8, "max_wait": 1e-3}, {"forward_in_thread": True}]
)


@pytest.mark.slow
@JOINTLY
def test_hosts_join_and_leave_while_the_rollout_runs(
    options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    envs = listening(limits=HASTY)
    first = hosting(envs.addresses[0], makers(tmp_path, 0))
    host = first.__enter__()
    with rollout_over(envs, **options) as rollout:
        fragments = iter(rollout.fragments())
        taken = [next(fragments)]
        with hosting(envs.addresses[0], makers(tmp_path, 1, 2), lanes=2):
            taken += taken_until(fragments, lambda more: slots_of(more) >= {0, 1, 2})
        taken += taken_until(fragments, lambda more: len(more) > 20 and slots_of(more[-5:]) == {0})
        assert [bool(lane.parts[0].fragment.columns) for lane in rollout.environments.lanes] == [True, False, False]
        host.stop()
        with hosting(envs.addresses[0], makers(tmp_path, 3)):  # no host is left, until this one comes
            taken += taken_until(fragments, lambda more: 3 in slots_of(more))
            rollout.drain()
            taken += list(fragments)
        check_laws(rollout, taken, tmp_path, 4)
    first.__exit__(None, None, None)
    assert sorted({f.lane for f in taken}) == [0, 1, 2, 3]
    assert "said goodbye: the host was stopped" in caplog.text


def test_nothing_is_kept_of_a_lane_that_has_left_nor_of_the_modules_that_served_it(tmp_path: Path) -> None:
    serving, envs = {"id": "first"}, listening()
    with (
        hosting(envs.addresses[0], makers(tmp_path, 0, length=3)),
        rollout_over(
            envs,
            module={"first": SerialModule(), "second": SerialModule()},
            agent_to_module_mapping_fn=lambda agent, episode: serving["id"],
        ) as rollout,
    ):
        fragments = iter(rollout.fragments())
        with hosting(envs.addresses[0], makers(tmp_path, 1, 2, length=3), lanes=2):
            taken = taken_until(fragments, lambda more: slots_of(more) >= {0, 1, 2})
        taken += taken_until(fragments, lambda more: all(lane.is_set_aside for lane in rollout.environments.lanes[1:]))
        taken += [next(fragments) for _ in range(5)]
        served = [weakref.ref(each.module) for lane in rollout.environments.lanes for each in lane.modules if each]
        assert len(served) == 1  # of the lane that is left
        of_lanes = [lane for _, lane in rollout.returns.by_module["first"]._open]
        assert (of_lanes, list(rollout.returns._open)) == ([0], [0])
        serving["id"] = "second"
        rollout.remove_module("first")
        for _ in range(5):
            taken.append(next(fragments))
        gc.collect()
        assert [ref() for ref in served] == [None]
        assert list(rollout.returns.by_module) == ["second"]
        rollout.drain()
        taken += list(fragments)
        check_laws(rollout, taken, tmp_path, 3)


@JOINTLY
def test_a_host_with_many_lanes_that_comes_late_is_room_made_for(options: dict[str, Any], tmp_path: Path) -> None:
    envs = listening()
    with hosting(envs.addresses[0], makers(tmp_path, 0)), rollout_over(envs, **options) as rollout:
        fragments = iter(rollout.fragments())
        taken = [next(fragments)]
        with hosting(envs.addresses[0], makers(tmp_path, *range(1, 12)), lanes=9):  # some are larger than max_batch
            taken += taken_until(fragments, lambda more: slots_of(more) >= set(range(12)))
            rollout.drain()
            taken += list(fragments)
        check_laws(rollout, taken, tmp_path, 12)


@pytest.mark.parametrize("ending", ["left", "ahead", "error", "never entered"])
def test_nothing_is_left_behind(ending: str, tmp_path: Path) -> None:
    def ran() -> None:
        envs = listening()
        with hosting(envs.addresses[0], makers(tmp_path, 0, 1), lanes=2):
            rollout = rollout_over(envs, prefetch=int(ending == "ahead"))
            if ending == "never entered":
                rollout.environments.close()
                return
            with rollout:
                fragments = iter(rollout.fragments())
                for _ in range(3):
                    next(fragments)
                if ending == "error":
                    raise ZeroDivisionError

    with suppress(ZeroDivisionError):
        ran()  # what is made once for all stays
    with nothing_left(), suppress(ZeroDivisionError):
        ran()


@pytest.mark.slow
def test_a_killed_hosts_agents_that_wait_are_lost_as_well(tmp_path: Path) -> None:
    envs = listening(limits=HASTY, join_timeout=30.0)
    victim = HostProcess(envs.addresses[0], told(tmp_path, 0, fate="kill", step=10, lives=1), env=DoomedAgents)
    try:
        with rollout_over(envs) as rollout:
            fragments = iter(rollout.fragments())
            taken = [next(fragments)]
            with hosting(envs.addresses[0], makers(tmp_path, 1)):
                taken += taken_until(fragments, lambda more: len(more) > 8)
                rollout.drain()
                taken += list(fragments)
            check_laws(rollout, taken, tmp_path, 2)
            waiting = steps_of(logs_of(tmp_path, 0)[0])[1]
            assert rollout.lost["workers"] > len(waiting)
    finally:
        victim.end()


class Kills(ConnectorV2):
    """Kills a host in one of its calls, while lanes are wherever they are."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.call, self.called, self.victim = call, 0, 0

    def __call__(self, *, batch: Any, **kwargs: Any) -> Any:
        if self.called == self.call:
            os.kill(self.victim, signal.SIGKILL)
        self.called += 1
        return batch


@pytest.mark.slow
@given(
    call=st.integers(0, 60),
    lanes=st.integers(1, 2),
    fragment_length=st.integers(1, 9),
    at_once=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=examples(6), phases=[Phase.explicit, Phase.generate])
def test_a_host_may_be_killed_at_any_moment(
    tmp_path_factory: pytest.TempPathFactory, call: int, lanes: int, at_once: bool, **drawn: Any
) -> None:
    folder, envs, kills = tmp_path_factory.mktemp("log"), listening(hosts=2, limits=HASTY), Kills(call)
    kinds: dict[str, Any] = {"length": 20, "at_once": at_once}
    victim = HostProcess(envs.addresses[0], told(folder, 0, 1, **kinds), lanes=lanes, env=DoomedAgents)
    kills.victim = victim.process.pid
    try:
        with (
            hosting(envs.addresses[0], makers(folder, 2, 3, **kinds), lanes=lanes),
            rollout_over(envs, env_to_module_connector=lambda part: kills, **drawn) as rollout,
        ):
            fragments = iter(rollout.fragments())
            taken = taken_until(fragments, lambda taken: kills.called > call + 20)
            rollout.drain()
            taken += list(fragments)
            check_laws(rollout, taken, folder, 4)
    finally:
        victim.end()


def test_a_reader_that_stalls_stops_the_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    can_not_go_on = stalling(monkeypatch)
    envs, kinds = listening(), {"agents": 2, "at_once": True, "length": 50}
    with (
        hosting(envs.addresses[0], makers(tmp_path, 0, 1, **kinds), lanes=2),
        rollout_over(envs, fragment_length=5, prefetch=2) as rollout,
    ):
        next(iter(rollout.fragments()))
        assert can_not_go_on.wait(60)
        assert rollout.num_steps == 3 * 2 * 5 * 2
