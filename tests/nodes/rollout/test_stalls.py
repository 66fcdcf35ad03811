"""Faults in real rollouts, which the stall doctor names with stage, cause, file and line."""

import logging
import os
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import held_envs
import pytest
from doctor_clock import Looking
from held_envs import LONGEST_S, Held, await_held, await_that, let_go
from numbered_agents import NumberedAgents
from numbered_module import NumberedEnv, NumberedModule
from stalled_rollouts import OPTIONS, await_blocker, being_read, line_of

from rollflow import ConnectorV2, MultiAgentRollout, Rollout
from rollflow.nodes import RandomModule
from rollflow.stream import StallError
from rollflow.stream.observe.stacks import is_debugged_now

ANYWHERE: dict[str, dict[str, Any]] = {
    "inline": {},
    "ahead": {"prefetch": 1},
    "threads": {"where": "threads"},
    "forward in a thread": {"where": "threads", "forward_in_thread": True},
    "processes": {"where": "processes", "workers": 1},
    "rollouts": {"where": "rollouts", "workers": 1},
}
PLACES = {
    "inline": r"env \(lane 0\)",
    "ahead": r"env \(lane 0\)",
    "threads": r"env \(lane 0, in its thread\)",
    "forward in a thread": r"env \(lane 0, in its thread\)",
    "processes": r"env \(lane 0, worker 0, pid \d+\)",
    "rollouts": r"rollouts \(lane 0, worker 0, pid \d+\)",
}


@pytest.mark.parametrize("place", ANYWHERE)
def test_a_step_that_hangs_is_named_with_its_place_and_its_line(place: str, tmp_path: Path) -> None:
    env = partial(Held, 0, tmp_path, lengths=(50, 50), steps=[3])
    rollout = Rollout(env, num_envs=1, module=NumberedModule(), **OPTIONS, **ANYWHERE[place])
    with being_read(rollout, lambda: let_go(tmp_path, 0)):
        await_held(tmp_path, 0)
        await_blocker(rollout, "rollouts" if place == "rollouts" else "env")
        lines = Looking(rollout._doctor).until_told(6.5).splitlines()
        is_one = r"no fragment for \d\.\d s: " + PLACES[place] + r" is in step\(\) since \d\.\d s; .*caller waits?.*"
        assert re.fullmatch(is_one, lines[0]), lines[0]
        assert any(line_of(Held.step, "self._wait()") in line for line in lines[1:-1]), lines
        assert lines[1].startswith(f"  at {held_envs.__file__}:")
        assert re.fullmatch(r"do: .* see docs/how_to/find_what_holds_back\.md#when-it-stands-still", lines[-1])
        diagnosis = rollout.diagnose()
        assert diagnosis.blocker is not None
        assert (diagnosis.state, diagnosis.blocker.doing, diagnosis.is_closed) == ("waits", "is in step()", False)
        assert any(frame.name.endswith("step") and frame.file == held_envs.__file__ for frame in diagnosis.stack)


@pytest.mark.parametrize("place", ["inline", "ahead", "threads", "processes"])
@pytest.mark.parametrize("number", [0, 1], ids=["before a step", "within a step"])
def test_a_first_reset_has_half_a_minute_and_is_named_then(place: str, number: int, tmp_path: Path) -> None:
    env = partial(Held, 0, tmp_path, lengths=(4, 4), resets=[number])
    rollout = Rollout(env, num_envs=1, module=NumberedModule(), **OPTIONS, **ANYWHERE[place])
    with being_read(rollout, lambda: let_go(tmp_path, 0)):
        await_held(tmp_path, 0)
        await_blocker(rollout, "env")
        looking = Looking(rollout._doctor)
        assert looking.for_s(25.0) == []
        text = looking.until_told(8.0)
        assert re.search(PLACES[place] + r" is in reset\(\) since", text), text
        assert line_of(Held.reset, "self._wait()") in text


@pytest.mark.parametrize("place", ["inline", "ahead", "threads", "processes"])
def test_a_later_reset_is_named_after_the_time_of_any_call(place: str, tmp_path: Path) -> None:
    env = partial(Held, 0, tmp_path, lengths=(3, 3), resets=[2])
    rollout = Rollout(env, num_envs=1, module=NumberedModule(), **OPTIONS, **ANYWHERE[place])
    with being_read(rollout, lambda: let_go(tmp_path, 0)):
        await_held(tmp_path, 0)
        await_blocker(rollout, "env", calls=1)
        text = Looking(rollout._doctor).until_told(6.5)
        assert re.search(PLACES[place] + r" is in reset\(\) since 5", text), text


class Locked(NumberedModule):
    """Takes a lock in its third forward pass that somebody else has."""

    def __init__(self) -> None:
        super().__init__()
        self.passes, self.lock, self.hangs = 0, threading.Lock(), threading.Event()
        self.lock.acquire()

    def __deepcopy__(self, memo: Any) -> "Locked":
        return self

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        self.passes += 1
        if self.passes == 3:
            self.hangs.set()
            with self.lock:
                pass
        return super()._forward(batch, **kwargs)


@pytest.mark.parametrize("place", ["inline", "ahead", "threads", "forward in a thread"])
def test_a_lock_in_a_module_is_named_with_its_line(place: str) -> None:
    module = Locked()
    rollout = Rollout(lambda: NumberedEnv(0), module=module, flat_forward=False, **OPTIONS, **ANYWHERE[place])
    with being_read(rollout, module.lock.release):
        assert module.hangs.wait(LONGEST_S)
        await_blocker(rollout, "module")
        text = Looking(rollout._doctor).until_told(6.5)
        assert re.match(r"no fragment for .*: module is in a forward pass since 5\.\d s; ", text), text
        assert (
            text.splitlines()[1]
            == f"  at {line_of(Locked._forward, 'with self.lock')} in Locked._forward: with self.lock:"
        )


class Stuck(ConnectorV2):
    """Stands still at its third call."""

    calls = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hangs, self.goes = threading.Event(), threading.Event()

    def __call__(self, *, batch: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == 3:
            self.hangs.set()
            self.goes.wait(LONGEST_S)
        return batch


@pytest.mark.parametrize("place", ["inline", "ahead", "threads"])
@pytest.mark.parametrize("pipeline", ["env_to_module", "module_to_env"])
def test_a_connector_that_stands_still_is_named_with_its_line(place: str, pipeline: str) -> None:
    piece = Stuck()
    connector: Any = {f"{pipeline}_connector": lambda env: piece}
    rollout = Rollout(lambda: NumberedEnv(0), module=NumberedModule(), **connector, **OPTIONS, **ANYWHERE[place])
    with being_read(rollout, piece.goes.set):
        assert piece.hangs.wait(LONGEST_S)
        await_blocker(rollout, pipeline)
        text = Looking(rollout._doctor).until_told(6.5)
        assert f": {pipeline} is in its call since 5." in text
        assert text.splitlines()[1].startswith(f"  at {line_of(Stuck.__call__, 'goes.wait')} in Stuck.__call__")


def test_a_learner_piece_that_stands_still_is_named() -> None:
    piece = Stuck()
    options = OPTIONS | {"num_fragments": 5}
    rollout = Rollout(
        lambda: NumberedEnv(0), module=NumberedModule(), learner_connector=lambda *spaces: piece, **options
    )
    with being_read(rollout, piece.goes.set):
        assert piece.hangs.wait(LONGEST_S)
        text = Looking(rollout._doctor).until_told(6.5)
        assert ": learner_pipeline makes a batch since 5." in text
        assert f"  at {line_of(Stuck.__call__, 'goes.wait')} in Stuck.__call__" in text
        assert "rollout.learner_pipeline.timers()" in text


@pytest.mark.slow
def test_a_reader_that_holds_its_batch_is_no_stall_and_diagnose_says_for_how_long() -> None:
    with Rollout(lambda: NumberedEnv(0), module=NumberedModule(), **(OPTIONS | {"num_fragments": 3})) as rollout:
        batches = rollout.batches()
        next(batches)
        next(batches)
        looking = Looking(rollout._doctor)
        assert looking.for_s(3600.0) == []
        diagnosis = rollout.diagnose()
        assert diagnosis.state == "caller works"
        assert re.fullmatch(
            r"the caller works: it has had its fragment for \d+\.\d s \(the median was \d+\.\d s\)", str(diagnosis)
        )


def test_a_worker_that_is_stopped_is_named_with_its_process(tmp_path: Path) -> None:
    env = partial(Held, 0, tmp_path, lengths=(50, 50), steps=[3])
    rollout = Rollout(env, num_envs=1, module=NumberedModule(), where="processes", **OPTIONS)
    pid = rollout.environments._workers[0].pid

    def go_on() -> None:
        os.kill(pid, signal.SIGCONT)
        let_go(tmp_path, 0)

    with being_read(rollout, go_on):
        await_held(tmp_path, 0)
        await_blocker(rollout, "env")
        os.kill(pid, signal.SIGSTOP)
        text = Looking(rollout._doctor).until_told(6.5)
        assert f"env (lane 0, worker 0, pid {pid}) is stopped, as by SIGSTOP since 5." in text
        assert f"do: kill -CONT {pid}" in text


def test_of_several_lanes_in_a_worker_the_one_that_hangs_is_named(tmp_path: Path) -> None:
    envs = [partial(Held, slot, tmp_path, lengths=(50, 50), steps=[3] if slot == 1 else []) for slot in range(2)]
    rollout = Rollout(envs, lanes=2, module=NumberedModule(), where="processes", workers=1, **OPTIONS)
    with being_read(rollout, lambda: let_go(tmp_path, 1)):
        await_held(tmp_path, 1)  # lane 0 waits for its turn in the same thread
        await_blocker(rollout, "env")
        text = Looking(rollout._doctor).until_told(7.5)
        assert re.search(r"env \(lane 1, worker 0, pid \d+\) is in step\(\)", text), text
        assert line_of(Held.step, "self._wait()") in text, text


# With the watcher's own thread


class Heard(logging.Handler):
    """Sets an event at the first record."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.has_come, self.is_over = threading.Event(), threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        (self.is_over if "it stood still" in self.texts[-1] else self.has_come).set()


@pytest.fixture
def heard() -> Iterator[Heard]:
    handler, logger = Heard(), logging.getLogger("rollflow.doctor")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


@pytest.mark.parametrize("place", ANYWHERE)
def test_the_log_says_it_by_itself_and_once_more_when_it_goes_on(place: str, tmp_path: Path, heard: Heard) -> None:
    env = partial(Held, 0, tmp_path, lengths=(50, 50), steps=[3])
    options = OPTIONS | {"stall_after": 0.3, "num_fragments": None}
    rollout = Rollout(env, num_envs=1, module=NumberedModule(), **options, **ANYWHERE[place])

    def read() -> None:
        with rollout:
            for _ in rollout.fragments():
                if heard.is_over.wait(0.0) or (heard.has_come.is_set() and heard.is_over.wait(LONGEST_S)):
                    return

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        try:
            assert heard.has_come.wait(LONGEST_S)
        finally:
            let_go(tmp_path, 0)
        reading.result()
    assert line_of(Held.step, "self._wait()") in heard.texts[0]
    assert re.fullmatch(r"it (goes on|has ended): it stood still for \d+\.\d s", heard.texts[1])
    assert not [thread for thread in threading.enumerate() if thread.name == "rollflow doctor"]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["ahead", "threads", "forward in a thread", "processes", "rollouts"])
def test_a_run_that_stands_still_is_ended_where_it_is_asked_for(place: str, tmp_path: Path) -> None:
    env = partial(Held, 0, tmp_path, lengths=(50, 50), steps=[3])
    options = OPTIONS | {"stall_after": 0.3, "on_stall": "raise"}
    with (
        pytest.raises(StallError, match=r"is in step\(\) since") as caught,
        Rollout(env, num_envs=1, module=NumberedModule(), **options, **ANYWHERE[place]) as rollout,
    ):
        try:
            next(rollout.fragments())
        finally:
            let_go(tmp_path, 0)
    assert line_of(Held.step, "self._wait()") in str(caught.value)
    assert caught.value.__notes__[-1] == "see docs/how_to/find_what_holds_back.md#when-it-stands-still"


def test_a_step_in_the_main_thread_is_broken_off_where_that_is_asked_for(tmp_path: Path) -> None:
    env = partial(Held, 0, tmp_path, lengths=(50, 50), steps=[3])
    options = OPTIONS | {"stall_after": 0.3, "on_stall": "raise"}
    with (
        pytest.raises(StallError, match=r"env \(lane 0\) is in step\(\)"),
        Rollout(env, num_envs=1, module=NumberedModule(), **options) as rollout,
    ):
        next(rollout.fragments())


def test_no_debugger_is_seen_where_there_is_none() -> None:
    assert not is_debugged_now()


def test_a_debugger_that_holds_a_thread_is_seen() -> None:
    goes, is_there = threading.Event(), threading.Event()
    code = compile("def prompt(wait):\n    wait()\n", "/usr/lib/python3/pdb.py", "exec")
    names: dict[str, Any] = {}
    exec(code, names)

    def hold() -> None:
        is_there.set()
        goes.wait(LONGEST_S)

    thread = threading.Thread(target=names["prompt"], args=(hold,))
    thread.start()
    try:
        assert is_there.wait(LONGEST_S)
        assert is_debugged_now()
    finally:
        goes.set()
        thread.join()


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.parametrize("place", ["inline", "processes"])
async def test_a_rollout_on_the_readers_event_loop_is_ended_too(place: str, tmp_path: Path) -> None:
    env = partial(Held, 0, tmp_path, lengths=(50, 50), steps=[3])
    options = OPTIONS | {"stall_after": 0.3, "on_stall": "raise"}
    rollout = Rollout(env, num_envs=1, module=NumberedModule(), **options, **ANYWHERE[place])
    if place == "inline":  # the loop's own thread hangs: the error comes when the step does
        threading.Timer(1.0, let_go, [tmp_path, 0]).start()
    try:
        with pytest.raises(StallError, match=r"env \(lane 0.*\) is in step\(\) since"):
            async with rollout:
                async for _ in rollout.fragments():
                    pass
    finally:
        let_go(tmp_path, 0)
    assert str(rollout.diagnose()) == "it is not running"


class HeldAgents(NumberedAgents):
    """Stands still in its third call of a method."""

    method = ""
    calls = 0
    hangs, goes = threading.Event(), threading.Event()

    def step(self, actions: Any) -> Any:
        self.wait("step")
        return super().step(actions)

    def reset(self, **kwargs: Any) -> Any:
        self.wait("reset")
        return super().reset(**kwargs)

    def wait(self, method: str) -> None:
        self.calls += self.method == method
        if self.method == method and self.calls == 3:
            self.hangs.set()
            self.goes.wait(LONGEST_S)


@pytest.mark.parametrize("place", ["inline", "ahead", "threads"])
@pytest.mark.parametrize("method", ["step", "reset"])
def test_a_call_of_several_agents_that_hangs_is_named(method: str, place: str) -> None:
    HeldAgents.hangs, HeldAgents.goes, HeldAgents.method = threading.Event(), threading.Event(), method
    options = OPTIONS | {"fragment_length": 256}
    rollout = MultiAgentRollout(lambda: HeldAgents(0, nested=0), module=RandomModule, **options, **ANYWHERE[place])
    with being_read(rollout, HeldAgents.goes.set):
        assert HeldAgents.hangs.wait(LONGEST_S)
        await_blocker(rollout, "env", calls=int(method == "reset"))
        text = Looking(rollout._doctor).until_told(6.5)
        assert re.search(PLACES[place] + rf" is in {method}\(\) since 5", text), text
        assert f"  at {line_of(HeldAgents.wait, 'goes.wait')} in HeldAgents.wait" in text


@pytest.mark.anyio
@pytest.mark.parametrize("place", ["inline", "threads", pytest.param("rollouts", marks=pytest.mark.slow)])
async def test_another_task_that_holds_up_the_event_loop_of_a_rollout_is_named(
    place: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = OPTIONS | {"num_fragments": None, "stall_after": 0.2}
    rollout = Rollout(lambda: NumberedEnv(0), module=NumberedModule(), **options, **ANYWHERE[place])
    told = "the event loop is held up by a task or a callback since "

    async def holds() -> None:  # from when the reader waits on
        await_that(lambda: told in caplog.text)

    async with rollout, anyio.create_task_group() as tasks:
        fragments = rollout.fragments()
        await anext(fragments)
        tasks.start_soon(holds)
        while told not in caplog.text:
            await anext(fragments)
    text = next(record.getMessage() for record in caplog.records if told in record.getMessage())
    first, *more = text.splitlines()
    assert re.fullmatch(rf"no fragment for \d+\.\d s: {told}\d+\.\d s; caller waits for it", first)
    assert any(line_of(holds, "await_that(") in line for line in more), text
    assert "await there, or do it in a thread" in more[-1]
