"""However a rollout on hosts ends, or a host: no thread, no socket, no process is left, and nobody waits in vain."""

import gc
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from held_envs import LONGEST_S, Held, await_held, is_closed, let_go
from leftovers import nothing_left, processes_of
from numbered_module import NumberedEnv
from remote_hosts import listening
from remote_rollouts import await_that, check_counts, rollout_over, rollouts_on
from ways import LoopError, end, end_async

from rollflow import RemoteRollouts

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


ENDINGS: dict[str, Callable[[Any], object]] = {
    "left": partial(end, ending="left", of="fragments"),
    "never entered": repr,
    "drained": partial(end, ending="drained", at=1, of="fragments"),
    "raised": lambda rollout: anyio.run(end_async, rollout, "raised", 1),
    "cancelled": lambda rollout: anyio.run(end_async, rollout, "cancelled", 1),
}


@pytest.mark.slow
@pytest.mark.parametrize(("ending", "prefetch"), [*((ending, 1) for ending in ENDINGS), ("drained", 0)])
def test_nothing_is_left_of_either_side(ending: str, prefetch: int) -> None:
    envs = listening(RemoteRollouts)
    with rollouts_on(envs.addresses[0], counting(0, 1, 2), lanes=2):
        assert Counting.open == 3
        with pytest.raises(LoopError) if ending == "raised" else nullcontext():
            ENDINGS[ending](rollout_over(envs, prefetch=prefetch))
        gc.collect()
    assert Counting.open == 0


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
    assert [env.life for lane in host._lanes for env in lane.env.env.envs] == [5, 5]


@pytest.mark.slow
def test_a_rollout_that_is_left_ends_the_fragments_of_its_hosts(tmp_path: Path) -> None:
    envs = listening(RemoteRollouts)
    with rollouts_on(envs.addresses[0], [partial(Held, 0, tmp_path, steps=[4])]) as host:
        with rollout_over(envs, fragment_length=ENDLESS, prefetch=1) as rollout:
            await_held(tmp_path, 0)
        await_that(lambda: host._lanes[0].session.grant is None)
        let_go(tmp_path, 0)
        jobs = host._threads[0]._jobs
        await_that(lambda: not jobs.qsize() and host._lanes[0].env.env.envs[0].life == 5)
    check_counts([], rollout)
    assert host._lanes[0].env.env.envs[0].life == 5


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
