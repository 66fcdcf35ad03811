"""Faults of rollouts that feed a trainer: each row of the table is a real run, and what the stall doctor says of it."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from doctor_clock import Looking
from feeding_rollouts import HASTY, trainer
from held_envs import Held, await_that, let_go
from numbered_module import NumberedEnv, NumberedModule
from stalled_rollouts import line_of
from stalled_runs import running

from rollflow import Graph, Rollout, TrainerStream
from rollflow.nodes.env.stepping import nothing
from rollflow.sinks import TrainerSink


class Fault(NamedTuple):
    """A row of the table.

    run        context manager of a folder: the graph, the address, and what ends the fault
    party      that the run finally waits for
    kind       of its wait
    text       pattern of what is said of it, after its name
    line       of the code that is named; None: it stands still elsewhere, or nowhere
    """

    run: Callable[[Path], Any]
    party: str
    kind: str
    text: str
    line: Callable[[], str] | None = None


def fed(address: Any, **options: Any) -> Graph:
    """A graph in which a rollout feeds the trainer at an address."""
    given = {"module": NumberedModule(), "env": lambda: NumberedEnv(0), "fragment_length": 8, "seed": 0, **options}
    graph = Graph("feed")
    graph.connect(Rollout(given.pop("env"), **given).fragments, TrainerSink(str(address), limits=HASTY))
    return graph


def hasty_trainer(**options: Any) -> TrainerStream:
    """A stream that does not wait long for a rollout that has left without a word."""
    return trainer(limits=HASTY, **options)


@contextmanager
def being_read(stream: TrainerStream) -> Iterator[None]:
    """Have a thread take one item after another from a stream, until the rollout has left."""

    def read() -> None:
        for _ in stream:
            pass

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        try:
            yield
        finally:
            stream.expect_no_more()
        reading.result()


@contextmanager
def silent(folder: Path) -> Iterator[Any]:
    with hasty_trainer(yields="fragments") as stream:  # nobody asks it for an item
        yield fed(stream.address), stream.address, nothing


@contextmanager
def failed(folder: Path) -> Iterator[Any]:
    stream = hasty_trainer(yields="fragments")
    stream.__enter__()

    def fail() -> None:
        next(iter(stream))
        stream.__exit__(ValueError, ValueError("out of memory"), None)

    with ThreadPoolExecutor(1) as pool:
        failing = pool.submit(fail)
        yield fed(stream.address), stream.address, nothing
        failing.result()


_PROGRAM = """
import sys; sys.path[:] = {path!r}
from rollflow import TrainerStream
with TrainerStream({address!r}, yields="fragments") as stream:
    next(iter(stream))
    print("has", flush=True)
    sys.stdin.read()
"""


@contextmanager
def killed(folder: Path) -> Iterator[Any]:
    address = f"unix:{folder}/trainer"
    program = _PROGRAM.format(path=sys.path, address=address)
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as process, ThreadPoolExecutor(1) as pool:

        def kill() -> None:
            assert process.stdout is not None
            process.stdout.readline()
            process.kill()

        killing = pool.submit(kill)
        yield fed(address), address, nothing
        killing.result()


@contextmanager
def env_hangs(folder: Path) -> Iterator[Any]:
    with hasty_trainer(yields="fragments") as stream, being_read(stream):
        yield (
            fed(stream.address, env=partial(Held, 0, folder, lengths=(50, 50), steps=[3])),
            stream.address,
            partial(let_go, folder, 0),
        )


TRAINER = "the trainer at {}"
IN_STEP = partial(line_of, Held.step, "self._wait()")
FAULTS = {
    "it takes nobody in": Fault(silent, TRAINER, "away", r"has not come: .*"),
    "it has failed": Fault(failed, TRAINER, "away", r"is gone: .*ValueError: out of memory"),
    "it was killed": Fault(killed, TRAINER, "away", r"is gone: .*"),
    "an environment hangs": Fault(env_hangs, "rollout/env", "call", r"is in step\(\)", IN_STEP),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_with_its_cause(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    with fault.run(tmp_path) as (graph, address, end_fault):
        party = fault.party.format(address)
        with running(graph, party, fault.kind, fault.text, end_fault) as run:
            if fault.line is not None:  # calls before the one that hangs are awaited as well, for a moment
                line = fault.line()
                await_that(lambda: line in str(run.diagnose()), run.diagnose)
            text = Looking(run.doctor).until_told(600.0)  # a first call has 30 s, once the stages before it rest
    assert re.match(rf"no item for \d+\.\d s: {re.escape(party)}( \(.*?\))? {fault.text}", text), text
    if fault.line is not None:
        assert line in text, text
