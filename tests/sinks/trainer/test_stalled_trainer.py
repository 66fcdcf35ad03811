"""The stall doctor names a trainer that does not come, and says nothing of one that is there and takes its time."""

import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from doctor_clock import Looking
from feeding_rollouts import SHORT, trainer
from held_envs import await_that
from numbered_module import NumberedEnv, NumberedModule
from stalled_rollouts import line_of
from stalled_runs import await_blocker, running

from rollflow.nodes import Rollout
from rollflow.sinks import TrainerSink, TrainerStream, feed
from rollflow.stream import Graph, StallError

LONGEST_S = 60.0


def numbered(**options: Any) -> Rollout:
    return Rollout(lambda: NumberedEnv(0), module=NumberedModule(), fragment_length=8, seed=0, **options)


def graph_to(address: str) -> Graph:
    graph = Graph("feed")
    graph.connect(numbered().fragments, TrainerSink(address, limits=SHORT))
    return graph


def looked_at(graph: Graph, party: str, kind: str, seconds: float) -> list[str]:
    """Texts of so many seconds of looks, once a party is what the run waits for, and is of that kind."""
    with running(graph, party, kind) as run:
        return Looking(run.doctor).for_s(seconds)


def test_a_trainer_that_does_not_come_is_named() -> None:
    address = "tcp://127.0.0.1:9"
    texts = looked_at(graph_to(address), f"the trainer at {address}", "away", 6.0)
    assert len(texts) == 1
    lines = texts[0].splitlines()
    assert re.match(rf"no item for 5\.\d s: the trainer at {address} has not come.* since 5\.\d s; ", lines[0]), lines
    assert lines[-1].startswith("do: start the trainer, or look at its address and its log; see docs/")


def test_a_trainer_that_takes_its_time_is_no_stall() -> None:
    with trainer(yields="fragments", prefetch=1) as stream:
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(next, iter(stream))
            address = str(stream.address)
            texts = looked_at(graph_to(address), f"the trainer at {address}", "holds back", 600.0)
            assert first.result().num_steps == 8
    assert texts == []


def learn_from(stream: TrainerStream, batches: int, has_last: threading.Event, goes: threading.Event) -> None:
    for _ in range(batches):
        next(iter(stream))
    has_last.set()
    goes.wait(LONGEST_S)  # an update that takes its time


def test_a_trainer_that_works_says_so_with_the_line_that_it_is_at() -> None:
    has_last, goes = threading.Event(), threading.Event()
    with trainer(yields="fragments", prefetch=0) as stream, ThreadPoolExecutor(1) as pool:
        learning = pool.submit(learn_from, stream, 3, has_last, goes)
        party = f"the trainer at {stream.address}"
        works = r"works on its batch \(the median was 0\.\d s\) since \d\.\d s"
        texts: list[str] = []  # in the first ones fragments may be on their way
        said = rf"no item for \d\.\d s: {re.escape(party)} {works}; "
        try:
            with running(graph_to(str(stream.address)), party, "holds back") as run:
                assert has_last.wait(LONGEST_S)

                def says_so() -> bool:
                    texts.append(str(run.diagnose()))
                    return re.match(said, texts[-1]) is not None

                await_that(says_so, lambda: texts[-1])
                text = texts[-1]
        finally:
            goes.set()
        learning.result()
    assert line_of(learn_from, "goes.wait") in text, text
    assert "do: nothing here: look at the trainer" in text


_TRAINER = """
import sys; sys.path[:] = {path!r}
from rollflow.sinks import TrainerStream
with TrainerStream({address!r}, yields="fragments", prefetch=0) as stream:
    next(iter(stream))
    print("has", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_a_trainer_that_is_stopped_is_said_not_to_answer(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/trainer"
    program = _TRAINER.format(path=sys.path, address=address)
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            party = f"the trainer at {address}"
            with running(graph_to(address), party, "holds back") as run:
                assert process.stdout is not None
                assert process.stdout.readline() == "has\n"
                process.send_signal(signal.SIGSTOP)
                await_blocker(run, party, "holds back")
                text = str(run.diagnose())
        finally:
            process.kill()
    assert re.match(rf"no item for \d\.\d s: {re.escape(party)} does not answer since ", text), text
    assert "do: look whether the trainer's process runs" in text


def test_a_feed_follows_the_rollouts_own_rules() -> None:
    rollout = numbered(stall_after=0.2, on_stall="raise")
    with pytest.raises(StallError, match=r"the trainer at tcp://127\.0\.0\.1:9 has not come"):
        feed(rollout, "tcp://127.0.0.1:9", limits=SHORT)
