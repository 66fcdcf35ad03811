"""Faults in real rollouts, which the stall doctor names with stage, cause, file and line."""

import logging
import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest
from doctor_clock import Looking
from held_envs import LONGEST_S, Held, await_file, await_held, await_that, let_go
from held_parts import HeldAgents, HeldModule, HeldPiece
from numbered_module import NumberedEnv, NumberedModule
from places import PLACES, rollout_at
from remote_hosts import HostProcess, listening
from remote_rollouts import HASTY
from stalled_rollouts import OPTIONS, await_blocker, await_bottleneck, await_end_of, being_read, in_thread, line_of

from rollflow import MultiAgentRollout, RemoteEnvs, Rollout, Watch
from rollflow.nodes import RandomModule
from rollflow.stream import StallError
from rollflow.stream.observe.run_socket import snapshots
from rollflow.stream.observe.stacks import is_debugged_now

WORKER = r"\(lane 0, worker 0, pid \d+\)"
HOST = r"\(lane 0, host sim \(.*\)\)"
ENVS = {
    "inline": r"env \(lane 0\)",
    "ahead": r"env \(lane 0\)",
    "threads": r"env \(lane 0, in its thread\)",
    "threads apart": r"env \((slot|lane) 0, in its thread\)",  # several agents step in lanes
    "processes": f"env {WORKER}",
    "processes apart": r"env \(slot 0, worker 0, pid \d+\)",
    "rollouts": f"rollouts {WORKER}",
    "hosts": f"env {HOST}",
    "hosted rollouts": f"rollouts {HOST}",
}
HERE = ["inline", "ahead", "threads", "threads apart"]

pytestmark = pytest.mark.usefixtures("folder")


class Fault(NamedTuple):
    """What comes to a stand: a function of an environment or of a stage's part, of which the log says this.

    held      arguments of `Held`
    places    where it is tried
    """

    function: Any
    says: str
    stage: str = "env"
    held: dict[str, Any] = {}  # noqa: RUF012
    places: list[str] = HERE


STEP, RESET = r"is in step\(\)", r"is in reset\(\)"
FAULTS = {
    "step": Fault(Held.step, STEP, held={"lengths": (50, 50), "steps": [3]}, places=list(ENVS)),
    "first reset": Fault(
        Held.reset, RESET, held={"resets": [0]}, places=[*HERE, "processes", "hosts", "hosted rollouts"]
    ),
    "first reset of an episode": Fault(
        Held.reset, RESET, held={"lengths": (4, 4), "resets": [1]}, places=[*HERE, "processes", "rollouts"]
    ),
    "later reset": Fault(
        Held.reset, RESET, held={"lengths": (3, 3), "resets": [2]}, places=[*HERE, "processes", "processes apart"]
    ),
    "step of agents": Fault(HeldAgents.step, STEP, places=[*HERE, "processes", "rollouts"]),
    "reset of agents": Fault(HeldAgents.reset, RESET),
    "module": Fault(HeldModule._forward, "is in a forward pass", "module", places=[*HERE, "rollouts"]),
    "env_to_module": Fault(HeldPiece.__call__, "is in its call", "env_to_module", places=[*HERE, "rollouts"]),
    "module_to_env": Fault(HeldPiece.__call__, "is in its call", "module_to_env"),
    "learner": Fault(HeldPiece.__call__, "makes a batch", "learner_pipeline", places=["inline"]),
}


def holding(place: str, folder: Path, **options: Any) -> Rollout:
    """A rollout that hangs in its environment's third step."""
    env = partial(Held, 0, folder, lengths=(50, 50), steps=[3])
    return Rollout(env, num_envs=1, module=NumberedModule(), **{**OPTIONS, **options}, **PLACES[place])


@contextmanager
def held_rollout(name: str, place: str, folder: Path) -> Iterator[Any]:
    """A rollout that has come to a stand, and goes on at the end."""
    fault, options = FAULTS[name], dict(OPTIONS)
    module: Any = NumberedModule()
    env: Any = partial(Held, 0, folder, **fault.held) if fault.held else partial(NumberedEnv, 0)
    if name.endswith("of agents"):
        env, module = partial(HeldAgents, folder, fault.function.__name__), RandomModule
        options |= {"kind": MultiAgentRollout, "fragment_length": 256}
    elif name == "module":
        module = HeldModule(folder)
    elif fault.stage != "env":
        options |= {f"{name}_connector": lambda *spaces: HeldPiece(folder), "num_fragments": 5}
    made = rollout_at(place, [env], acts={"module": module}, hosts={"name": "sim"}, **options)
    with made as rollout, being_read(rollout, lambda: let_go(folder, 0)):
        await_held(folder, 0)
        yield rollout


@pytest.mark.parametrize(("name", "place"), [(name, place) for name, fault in FAULTS.items() for place in fault.places])
def test_what_hangs_is_named_with_its_place_and_its_line(name: str, place: str, tmp_path: Path) -> None:
    """By the log and `diagnose()`, in a snapshot as other processes take it, and in the report."""
    function, says, stage, *_ = FAULTS[name]
    has_rollouts, is_hosted = place in ("rollouts", "hosted rollouts"), place in ("hosts", "hosted rollouts")
    if is_hosted:
        says = rf"has no answer to {function.__name__}\(\)"
    elif has_rollouts and stage != "env":
        says = f"is in node '{stage}'"
    party = ENVS[place] if has_rollouts or stage == "env" else stage
    with held_rollout(name, place, tmp_path) as rollout:
        await_blocker(rollout, party.split()[0], calls=int(name == "later reset" or (is_hosted and name == "step")))
        looking = Looking(rollout._doctor)
        if name.startswith("first reset") and place != "rollouts":
            assert looking.for_s(25.0) == []  # it has half a minute
        lines = looking.until_told(10.0 if looking.spent else 6.5).splitlines()
        assert re.fullmatch(rf"no fragment for \d+\.\d s: {party} {says} since \d+\.\d s; .*", lines[0]), lines[0]
        assert lines[-1].startswith("do: ")
        diagnosis, [found] = rollout.diagnose(), snapshots()
        assert diagnosis.blocker is not None
        assert re.fullmatch(says, diagnosis.blocker.doing)
        assert (diagnosis.state, diagnosis.is_closed, found["diagnosis"]["state"]) == ("waits", False, "waits")
        assert re.search(f"{party} {says}", found["diagnosis"]["text"])
        [told] = [each for each in found["parties"] if re.fullmatch(party, each["name"])]
        assert told["age_s"] > 0.0
        if not is_hosted:
            at = line_of(function, "held.call()" if function.__qualname__ != f"Held.{function.__name__}" else "_wait()")
            assert any(at in line for line in lines[1:-1]), lines
            assert any(frame.name.endswith(function.__name__) for frame in diagnosis.stack)
        if name in ("step", "first reset", "module"):
            report = await_bottleneck(rollout.report, "rollouts" if place == "hosted rollouts" else stage)
            assert f"held back by {report.bottleneck}" in str(report)


@pytest.mark.slow
def test_a_reader_that_holds_its_batch_is_no_stall_and_diagnose_says_for_how_long() -> None:
    with Rollout(lambda: NumberedEnv(0), module=NumberedModule(), **(OPTIONS | {"num_fragments": 3})) as rollout:
        batches = rollout.batches()
        next(batches)
        next(batches)
        looking = Looking(rollout._doctor)
        assert looking.for_s(600.0) == []
        diagnosis = rollout.diagnose()
        assert diagnosis.state == "caller works"
        assert re.fullmatch(
            r"the caller works: it has had its fragment for \d+\.\d s \(the median was \d+\.\d s\)", str(diagnosis)
        )


def test_a_worker_that_is_stopped_is_named_with_its_process(tmp_path: Path) -> None:
    rollout = holding("processes", tmp_path)
    pid = rollout.environments._workers[0].process.pid

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


@pytest.mark.parametrize("place", ["processes", "hosts"])
def test_of_several_lanes_in_a_process_the_one_that_hangs_is_named(place: str, tmp_path: Path) -> None:
    envs = [partial(Held, slot, tmp_path, lengths=(50, 50), steps=[3] if slot == 1 else []) for slot in range(2)]
    options: Any = {"envs": {"lanes": 2}, "acts": {"module": NumberedModule()}, "hosts": {"name": "sim"}, **OPTIONS}
    with rollout_at(place, envs, **options) as rollout, being_read(rollout, lambda: let_go(tmp_path, 1)):
        await_held(tmp_path, 1)  # lane 0 of the worker waits for its turn in the same thread
        if place == "hosts":
            await_end_of(rollout, 0)
        await_blocker(rollout, "env", calls=int(place == "hosts"))
        text = Looking(rollout._doctor).until_told(8.0)
    told = r"host sim \(.*\)\) has no answer to" if place == "hosts" else r"worker 0, pid \d+\) is in"
    assert re.search(rf"env \(lane 1, {told} step\(\)", text), text
    assert place == "hosts" or line_of(Held.step, "self._wait()") in text, text


@pytest.mark.parametrize(("place", "prefetch"), [("threads apart", 0), ("threads apart", 1), ("processes apart", 0)])
def test_the_slot_that_hangs_is_named_where_a_call_waits_for_all_slots(
    place: str, prefetch: int, tmp_path: Path
) -> None:
    held: Any = {"steps": [3], "makes": [1]}
    envs = [partial(Held, slot, tmp_path, lengths=(50, 50), **(held if slot == 2 else {})) for slot in range(4)]
    options = {**PLACES[place], **OPTIONS, "prefetch": prefetch, **({"workers": 2} if "processes" in place else {})}
    rollout = Rollout(envs, module=NumberedModule(), **options)
    source = rollout.environments

    def go_on() -> None:
        let_go(tmp_path, 2)
        let_go(tmp_path, 2, times=1)

    with being_read(rollout, go_on):
        await_held(tmp_path, 2)
        await_that(lambda: source.waits_in_call and len(list(source.at_work("env"))) == 1, rollout.diagnose)
        text = Looking(rollout._doctor).until_told(6.5)
        at = r"worker 1, pid \d+" if place == "processes apart" else "in its thread"
        assert re.match(rf"no fragment for 5\.\d s: env \(slot 2, {at}\) is in step\(\) since 5\.\d s; ", text), text
        assert line_of(Held.step, "self._wait()") in text, text
        assert "\ndo: have it return; Timeouts(step=…) ends the " in text
        if place == "processes apart":
            os.kill(source._workers[1].process.pid, signal.SIGKILL)
            await_held(tmp_path, 2, times=1)
            blocker = rollout.diagnose().blocker
            assert blocker is not None
            assert re.fullmatch(r"env \(the worker of slots 2 to 3, worker 1, pid \d+\)", blocker.name)
            assert blocker.doing == "makes its environments"


class WithoutEnd(NumberedEnv):
    """Is in C code, which lets no other thread of the process have the interpreter, in its first life's third step."""

    def __init__(self, folder: Path) -> None:
        super().__init__(0)
        self.folder, self.steps = folder, 0

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps == 3 and not (self.folder / "hangs").exists():
            (self.folder / "hangs").touch()
            re.fullmatch("(a+)+b", "a" * 64)
        return super().step(action)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["processes", "rollouts"])
def test_a_worker_that_hangs_in_c_code_gives_its_stack_too(where: str, tmp_path: Path) -> None:
    rollout = Rollout(lambda: WithoutEnd(tmp_path), module=NumberedModule(), **OPTIONS, **PLACES[where])
    pid = rollout.environments._workers[0].process.pid
    with being_read(rollout, partial(os.kill, pid, signal.SIGKILL)):
        await_file(tmp_path / "hangs")
        await_blocker(rollout, "rollouts" if where == "rollouts" else "env")
        text = Looking(rollout._doctor).until_told(6.5)
    assert re.search(WORKER + r" is in step\(\) since 5\.", text), text
    assert f"  at {line_of(WithoutEnd.step, 're.fullmatch')}" in text, text


@pytest.mark.slow
def test_a_host_that_was_killed_is_named_and_then_that_none_is_left(tmp_path: Path) -> None:
    remote = listening(RemoteEnvs, limits=HASTY)
    makers = [((0, tmp_path), {"lengths": (50, 50), "steps": [3]})]
    host = HostProcess(remote.addresses[0], makers, name="sim", env=Held)
    rollout = Rollout(remote, module=NumberedModule(), **OPTIONS)

    def none_is_left() -> bool:
        assert rollout._doctor is not None
        look, blocker = rollout._doctor.look(), rollout.diagnose().blocker
        has_steps = look is not None and look.exits[0].items == 1  # the fragment of the lost lane's steps has left
        return has_steps and blocker is not None and blocker.doing == "has no host left, and waits for others"

    def kill() -> None:
        await_held(tmp_path, 0)
        host.signal(signal.SIGKILL)
        host.process.join()
        await_that(none_is_left, rollout.diagnose)

    another = HostProcess(remote.addresses[0], [((1,), {})], name="another")
    another.signal(signal.SIGSTOP)
    with being_read(rollout, partial(another.signal, signal.SIGCONT)):
        kill()
        await_blocker(rollout, "env")
        text = Looking(rollout._doctor).until_told(8.0)
    another.end()
    assert re.match(r"no fragment for 5\.\d s: env has no host left, and waits for others since 5\.\d s; ", text), text
    assert "do: start a host" in text


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


@pytest.mark.parametrize("place", PLACES)
def test_the_log_says_it_by_itself_and_once_more_when_it_goes_on(place: str, tmp_path: Path, heard: Heard) -> None:
    rollout = holding(place, tmp_path, watch=Watch(stall_after=0.3), num_fragments=None)

    def read() -> None:
        with rollout:
            for _ in rollout.fragments():
                if heard.is_over.wait(0.0) or (heard.has_come.is_set() and heard.is_over.wait(LONGEST_S)):
                    return

    with in_thread(read, partial(let_go, tmp_path, 0)):
        assert heard.has_come.wait(LONGEST_S)
    assert line_of(Held.step, "self._wait()") in heard.texts[0]
    assert re.fullmatch(r"it (goes on|has ended): it stood still for \d+\.\d s", heard.texts[1])
    assert not [thread for thread in threading.enumerate() if thread.name == "rollflow doctor"]


SLOW_PLACES = ["ahead", "threads", "processes", "rollouts"]


@pytest.mark.parametrize("place", ["inline", *(pytest.param(place, marks=pytest.mark.slow) for place in SLOW_PLACES)])
def test_a_run_that_stands_still_is_ended_where_it_is_asked_for(place: str, tmp_path: Path) -> None:
    """Inline a step in the main thread is broken off; in any other place it goes on once the loop has its error."""
    held = holding(place, tmp_path, watch=Watch(stall_after=0.3, on_stall="raise"))
    with pytest.raises(StallError, match=r"is in step\(\) since") as caught, held as rollout:
        try:
            next(rollout.fragments())
        finally:
            let_go(tmp_path, 0)
    assert line_of(Held.step, "self._wait()") in str(caught.value)
    assert caught.value.__notes__[-1] == "see docs/how_to/find_what_holds_back.md#when-it-stands-still"


def test_a_debugger_is_seen_while_it_holds_a_thread() -> None:
    assert not is_debugged_now()
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
    rollout = holding(place, tmp_path, watch=Watch(stall_after=0.3, on_stall="raise"))
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


@pytest.mark.anyio
@pytest.mark.parametrize("place", ["inline", "ahead", "threads", pytest.param("rollouts", marks=pytest.mark.slow)])
async def test_another_task_that_holds_up_the_event_loop_is_named(place: str, caplog: pytest.LogCaptureFixture) -> None:
    options = OPTIONS | {"num_fragments": None, "watch": Watch(stall_after=0.2)}
    rollout = Rollout(lambda: NumberedEnv(0), module=NumberedModule(), **options, **PLACES[place])
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
