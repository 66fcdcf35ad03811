"""A process answers the signal of `rollflow doctor` while a run wants it to, and leaves nothing behind."""

import faulthandler
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

import pytest
from leftovers import nothing_left

from rollflow.stream.observe import stacks
from rollflow.stream.observe.stacks import (
    DUMP_SIGNAL,
    answering_dumps,
    dumps_of,
    stack_in_dump,
    thread_dump,
    worker_dump_file,
)

HERE = os.getpid()
_BUSY = """
import threading
from rollflow.stream.observe.stacks import answering_dumps

ends = threading.Event()

def deep(calls):
    return 1 + deep(calls - 1) if calls else 0

def work():
    while not ends.is_set():
        deep(400)

with answering_dumps():
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    print("here", flush=True)
    input()
    ends.set()
    for thread in threads:
        thread.join()
print("well")
"""


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    with nothing_left():
        yield
    assert dumps_of(HERE, 2.0) is None


@contextmanager
def holding_thread(begin: Callable[[], object] = lambda: None) -> Iterator[threading.Thread]:
    """A thread that waits, once it has begun, until the block's end."""
    goes, is_there = threading.Event(), threading.Event()

    def hold() -> None:
        begin()
        is_there.set()
        goes.wait(60.0)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert is_there.wait(60.0)
        yield thread
    finally:
        goes.set()
        thread.join()


@pytest.mark.slow
def test_threads_that_run_meanwhile_go_on_whenever_they_are_asked() -> None:
    """In a process of its own: one whose threads wrote each other's stacks would end."""
    process = subprocess.Popen([sys.executable, "-c", _BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    for _ in range(40):
        dumps = dumps_of(process.pid, 10.0)
        assert dumps is not None
        assert len(dumps) == 3
        assert all(stack_in_dump(text) for text in dumps.values())
    assert process.communicate("end\n")[0] == "well\n"
    assert process.returncode == 0


@pytest.mark.slow
def test_a_thread_that_blocks_the_signal_is_left_out() -> None:
    block = partial(signal.pthread_sigmask, signal.SIG_BLOCK, {DUMP_SIGNAL})
    with holding_thread(block) as other, answering_dumps():
        dumps = dumps_of(HERE, 60.0)
    assert dumps is not None
    assert other.native_id not in dumps


@pytest.mark.slow
def test_it_answers_until_the_last_run_has_ended() -> None:
    first, second = answering_dumps(), answering_dumps()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert dumps_of(HERE, 2.0)
    second.__exit__(None, None, None)
    assert dumps_of(HERE, 2.0) is None


def test_the_file_of_a_worker_does_not_grow_with_every_question() -> None:
    with worker_dump_file() as file:
        faulthandler.register(DUMP_SIGNAL, file=file, all_threads=False)
        try:
            texts = [thread_dump(HERE, HERE, file.fileno(), 60.0, is_emptied=True) for _ in range(3)]
        finally:
            faulthandler.unregister(DUMP_SIGNAL)
        assert os.fstat(file.fileno()).st_size == len(texts[-1].encode())
    assert all(text.startswith(texts[0][:16]) for text in texts)


def test_a_signal_that_somebody_else_uses_is_left_to_him() -> None:
    came: list[int] = []
    before = signal.signal(DUMP_SIGNAL, lambda number, frame: came.append(number))
    try:
        with answering_dumps():
            assert dumps_of(HERE, 2.0) is None
            signal.raise_signal(DUMP_SIGNAL)
        assert came == [DUMP_SIGNAL]
    finally:
        signal.signal(DUMP_SIGNAL, before)


def test_a_process_that_is_not_there_gives_nothing() -> None:
    assert not Path(f"/proc/{1 << 22}").exists()
    assert dumps_of(1 << 22, 2.0) is None


def test_a_forked_process_answers_for_itself_whatever_its_parents_thread_does(monkeypatch: pytest.MonkeyPatch) -> None:
    is_within, goes, make = threading.Event(), threading.Event(), stacks._dump_file

    def held(name: str) -> IO[bytes]:
        is_within.set()
        assert goes.wait(60.0)
        return make(name)

    def start() -> None:
        with answering_dumps():
            pass

    monkeypatch.setattr(stacks, "_dump_file", held)
    starts = threading.Thread(target=start)
    starts.start()
    assert is_within.wait(60.0)
    monkeypatch.undo()
    _expect_that_a_forked_process_answers()
    goes.set()
    starts.join()


@pytest.mark.slow
def test_a_process_that_is_forked_while_its_parent_answers_answers_for_itself() -> None:
    with answering_dumps():
        assert _expect_that_a_forked_process_answers() is None
        assert dumps_of(HERE, 2.0)


def _expect_that_a_forked_process_answers() -> dict[int, str] | None:
    """Fork a process and look at what it says within a run of its own; return what it said before."""

    def run(pipe: Any) -> None:
        before = dumps_of(os.getpid(), 2.0)
        with answering_dumps():
            pipe.send((before, dumps_of(os.getpid(), 2.0)))

    fork = multiprocessing.get_context("fork")
    mine, its = fork.Pipe()
    process = fork.Process(target=run, args=(its,))
    process.start()
    try:
        assert mine.poll(60.0)
        before, said = mine.recv()
        process.join()
    finally:
        process.kill()
        process.join()
        mine.close()
        its.close()
        process.close()
    assert any("in run" in text for text in said.values())
    return before
