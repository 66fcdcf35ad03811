"""Hosts and trainers in processes of their own whose clocks are minutes away from the one here."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rollflow.nodes import EnvHost

# Whatever rollflow takes its times with is away, before it is imported.
_SHIFT = """
import sys, time
_clock, _shift = time.perf_counter_ns, int(sys.argv[1])
time.perf_counter_ns = lambda: _clock() + _shift
sys.path[:] = {path!r}
"""
_HOST = """
from functools import partial
from numbered_module import NumberedEnv, NumberedModule
from rollflow.nodes import EnvHost, RolloutHost
with {kind}([partial(NumberedEnv, number) for number in range(4)], lanes=2, name="sim"{more}) as host:
    host.connect(sys.argv[2], retry_s=30.0)
"""
_TRAINER = """
from numbered_module import NumberedModule
from rollflow.sinks import TrainerStream
updates = 0
with TrainerStream("tcp://127.0.0.1:0", module=NumberedModule(), fragments_per_batch={count}) as stream:
    print(stream.address, flush=True)
    for batch in stream:
        updates += 1
print(updates, flush=True)
"""


@contextmanager
def shifted_host(address: Any, kind: type[Any], shift_s: int) -> Iterator[None]:
    """A host of two lanes with two environments each, whose clock is so many seconds ahead; it is to end by itself."""
    more = "" if kind is EnvHost else ", module=NumberedModule()"
    program = _SHIFT.format(path=sys.path) + _HOST.format(kind=kind.__name__, more=more)
    with _running(program, shift_s, str(address)):
        yield


@contextmanager
def shifted_trainer(shift_s: int, count: int | None) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """A trainer whose clock is so many seconds ahead: its address, and its process, which prints the updates made.

    count    `fragments_per_batch`
    """
    with _running(_SHIFT.format(path=sys.path) + _TRAINER.format(count=count), shift_s) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process


@contextmanager
def _running(program: str, shift_s: int, *arguments: str) -> "Iterator[subprocess.Popen[str]]":
    command = [sys.executable, "-c", program, str(shift_s * 10**9), *arguments]
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE) as process:
        try:
            yield process
            assert process.wait() == 0
        finally:
            process.kill()
