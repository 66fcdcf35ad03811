"""However a rollout on hosts ends, or a host: no thread, no socket, no process is left, and nobody waits in vain."""

import gc
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from held_envs import LONGEST_S, Held, await_held, is_closed, let_go
from leftovers import nothing_left, processes_of
from numbered_module import NumberedEnv, NumberedModule
from remote_hosts import BrokenWire, RawHost, dialled_host, listening
from remote_rollouts import await_that, check_counts, makers, rollout_over, rollouts_on

from rollflow import RemoteRollouts
from rollflow.nodes import RolloutHost
from rollflow.stream.wire import Goodbye, Welcome

ENDLESS = 1_000_000


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No threads, descriptors and processes but those from before; some of those may have ended meanwhile."""
    before = processes_of()
    with nothing_left():
        yield
    assert processes_of() <= before


class Counting(NumberedEnv):
    """Tells how many are open."""

    open = 0

    def __init__(self, slot: int, **kwargs: Any) -> None:
        super().__init__(slot, **kwargs)
        Counting.open += 1

    def close(self) -> None:
        super().close()
        Counting.open -= 1


def counting(*slots: int) -> list[Any]:
    return [partial(Counting, slot) for slot in slots]


def read_some(envs: Any, prefetch: int) -> None:
    with rollout_over(envs, prefetch=prefetch) as rollout:
        fragments = iter(rollout.fragments())
        for _ in range(3):
            next(fragments)


def never_enter(envs: Any, prefetch: int) -> None:
    rollout_over(envs, prefetch=prefetch)


def drain(envs: Any, prefetch: int) -> None:
    with rollout_over(envs, prefetch=prefetch) as rollout:
        next(iter(rollout.fragments()))
        rollout.drain()
        list(rollout.fragments())


def fail(envs: Any, prefetch: int) -> None:
    with pytest.raises(ZeroDivisionError), rollout_over(envs, prefetch=prefetch) as rollout:
        for _ in rollout.batches():
            raise ZeroDivisionError


def fail_in_a_loop(envs: Any, prefetch: int) -> None:
    async def run_through() -> None:
        async with rollout_over(envs, prefetch=prefetch) as rollout:
            async for _ in rollout.batches():
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        anyio.run(run_through)


def be_cancelled(envs: Any, prefetch: int) -> None:
    async def run_through() -> None:
        with anyio.CancelScope() as scope:
            async with rollout_over(envs, prefetch=prefetch) as rollout:
                async for _ in rollout.fragments():
                    scope.cancel()
                    await anyio.lowlevel.checkpoint()

    anyio.run(run_through)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ends", "prefetch"),
    [
        *((ends, 1) for ends in (read_some, never_enter, drain, fail, fail_in_a_loop, be_cancelled)),
        *((ends, 0) for ends in (read_some, drain, be_cancelled)),
    ],
)
def test_nothing_is_left_of_either_side(ends: Callable[[Any, int], None], prefetch: int) -> None:
    envs = listening(RemoteRollouts)
    with rollouts_on(envs.addresses[0], counting(0, 1, 2), lanes=2):
        assert Counting.open == 3
        ends(envs, prefetch)
        gc.collect()
    assert Counting.open == 0


@pytest.mark.slow
def test_nothing_is_left_of_a_host_that_is_dialled(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/host"
    with dialled_host(address, counting(0, 1), lanes=2, kind=RolloutHost, module=NumberedModule()):
        for _ in range(2):
            read_some(RemoteRollouts.connect(address), 1)
    assert Counting.open == 0
    assert not (tmp_path / "host").exists()


@pytest.mark.slow
def test_nothing_is_left_of_a_host_that_never_dialled() -> None:
    with RolloutHost(counting(0, 1), lanes=2, module=NumberedModule()):
        assert Counting.open == 2
    assert Counting.open == 0


@pytest.mark.slow
def test_nothing_is_left_of_connections_that_break(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollflow.stream.net.backoff.FIRST_S", 0.001)
    envs = listening(RemoteRollouts)
    wire = BrokenWire(envs.addresses[0], lambda: 3000)
    try:
        with rollouts_on(wire.address, counting(0)), rollout_over(envs, prefetch=1) as rollout:
            fragments = iter(rollout.fragments())
            while wire.cuts < 10:
                next(fragments)
    finally:
        wire.close()


# In the middle of a fragment


@pytest.mark.slow
def test_a_host_that_is_closed_waits_for_no_fragment(tmp_path: Path) -> None:
    """One step is made to its end, and no other: the fragment would never be done."""
    envs = listening(RemoteRollouts)
    held = [partial(Held, slot, tmp_path, steps=[4]) for slot in range(2)]
    hosting = rollouts_on(envs.addresses[0], held, lanes=2)
    host = hosting.__enter__()
    with rollout_over(envs, fragment_length=ENDLESS, prefetch=1):
        for slot in range(2):
            await_held(tmp_path, slot)
        closing = threading.Thread(target=hosting.__exit__, args=(None, None, None))
        closing.start()
        await_that(lambda: all(lane.session.grant is None for lane in host._lanes))
        for slot in range(2):
            let_go(tmp_path, slot)
        closing.join(LONGEST_S)
        assert not closing.is_alive()
    assert all(is_closed(tmp_path, slot) for slot in range(2))
    assert [env.life for lane in host._lanes for env in lane.env.envs] == [5, 5]


@pytest.mark.slow
def test_a_rollout_that_is_left_ends_the_fragments_of_its_hosts(tmp_path: Path) -> None:
    envs = listening(RemoteRollouts)
    with rollouts_on(envs.addresses[0], [partial(Held, 0, tmp_path, steps=[4])]) as host:
        with rollout_over(envs, fragment_length=ENDLESS, prefetch=1) as rollout:
            await_held(tmp_path, 0)
        await_that(lambda: host._lanes[0].session.grant is None)
        let_go(tmp_path, 0)
        [jobs] = host._work._threads._jobs
        await_that(lambda: not jobs.qsize() and host._lanes[0].env.envs[0].life == 5)
    check_counts([], rollout)
    assert host._lanes[0].env.envs[0].life == 5


@pytest.mark.slow
def test_leaving_waits_for_no_environment_that_hangs(tmp_path: Path) -> None:
    envs = listening(RemoteRollouts)
    try:
        with rollouts_on(envs.addresses[0], [partial(Held, 0, tmp_path, steps=[2])]):
            began = time.monotonic()
            with rollout_over(envs, step_timeout=None, prefetch=1):
                await_held(tmp_path, 0)
            assert time.monotonic() - began < LONGEST_S / 2
            let_go(tmp_path, 0)
    finally:
        let_go(tmp_path, 0)


@pytest.mark.slow
def test_a_host_is_told_why_it_ends() -> None:
    envs = listening(RemoteRollouts)
    reasons: list[str] = []
    with RolloutHost(makers(0), module=NumberedModule()) as host:
        serving = threading.Thread(target=lambda: reasons.append(host.connect(str(envs.addresses[0]))))
        serving.start()
        with rollout_over(envs) as rollout:
            next(iter(rollout.fragments()))
        serving.join()
    assert reasons == ["the rollout has ended"]


@pytest.mark.slow
def test_a_host_by_hand_is_told_goodbye() -> None:
    envs = listening(RemoteRollouts)
    heard: list[Any] = []
    with rollouts_on(envs.addresses[0], makers(0)), rollout_over(envs, prefetch=1) as rollout:
        next(iter(rollout.fragments()))
        raw = RawHost(envs.addresses[0], kind=RolloutHost)
        raw.next_of(Welcome)
        reading = threading.Thread(target=lambda: heard.append(raw.next_of(Goodbye)))
        reading.start()
    reading.join()
    raw.sock.close()
    assert heard[0].reason == "the rollout has ended"


PROGRAM = """
import signal, sys; sys.path[:] = {path!r}
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever whoever runs the tests makes of it
from functools import partial
from numbered_module import NumberedEnv, NumberedModule
from rollflow import RemoteRollouts, Rollout
from rollflow.nodes import RolloutHost

if sys.argv[1] == "host":
    with RolloutHost([partial(NumberedEnv, slot) for slot in range(2)], lanes=2, module=NumberedModule()) as host:
        print(host.connect(sys.argv[2]), flush=True)
else:
    envs = RemoteRollouts.listen(sys.argv[2])
    with Rollout(envs, module=NumberedModule(), fragment_length={endless}, prefetch=1) as rollout:
        print("running", flush=True)
        for fragment in rollout.fragments():
            pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("interrupted", ["host", "rollout"])
def test_an_interrupt_in_the_middle_of_a_fragment_ends_its_program(tmp_path: Path, interrupted: str) -> None:
    program, address = PROGRAM.format(path=sys.path, endless=ENDLESS), f"unix:{tmp_path}/gateway"
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    programs = {
        name: subprocess.Popen([sys.executable, "-c", program, name, address], **pipes) for name in ("rollout", "host")
    }
    try:
        assert programs["rollout"].stdout.readline() == "running\n"  # type: ignore[union-attr]
        programs[interrupted].send_signal(signal.SIGINT)
        _, told = programs[interrupted].communicate(timeout=LONGEST_S)
        assert "KeyboardInterrupt" in told
        if interrupted == "rollout":
            said, told = programs["host"].communicate(timeout=LONGEST_S)
            assert said == "the rollout has ended\n"
            lines = told.splitlines()  # where the host was there first, it says that it waits
            assert all("waiting: gateway" in line or "connected after" in line for line in lines)
    finally:
        for each in programs.values():
            each.kill()
            each.communicate()
