"""A process answers the signal of `rollflow doctor` while a run wants it to, and leaves nothing behind."""

import faulthandler
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from leftovers import nothing_left

from rollflow.stream.doctor import stack_dumps
from rollflow.stream.doctor.stack_dumps import DUMP_SIGNAL, answering_dumps, asked_dump, dump_of, worker_dump_file
from rollflow.stream.doctor.stacks import stack_in_dump, stacks_in_dump

HERE = os.getpid()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    with nothing_left():
        yield
    assert dump_of(HERE, 2.0) is None


def test_every_thread_is_in_the_dump_and_the_main_one_last() -> None:
    goes, is_there = threading.Event(), threading.Event()

    def hold() -> None:
        is_there.set()
        goes.wait(60.0)

    other = threading.Thread(target=hold)
    other.start()
    try:
        assert is_there.wait(60.0)
        with answering_dumps():
            text = dump_of(HERE, 2.0)
    finally:
        goes.set()
        other.join()
    assert text is not None
    stacks = stacks_in_dump(text)
    assert list(stacks)[-1] == threading.main_thread().ident
    assert any(frame.name == "hold" and frame.file == __file__ for frame in stack_in_dump(text, other.ident or 0))


def test_it_answers_until_the_last_run_has_ended() -> None:
    first, second = answering_dumps(), answering_dumps()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert dump_of(HERE, 2.0)
    second.__exit__(None, None, None)
    assert dump_of(HERE, 2.0) is None


def test_the_file_of_a_worker_does_not_grow_with_every_question() -> None:
    ask = lambda: os.kill(HERE, DUMP_SIGNAL)  # noqa: E731
    with worker_dump_file() as file:
        faulthandler.register(DUMP_SIGNAL, file=file)
        try:
            texts = [asked_dump(ask, file.fileno(), 60.0, is_emptied=True) for _ in range(3)]
        finally:
            faulthandler.unregister(DUMP_SIGNAL)
        assert os.fstat(file.fileno()).st_size == len(texts[-1].encode())
    assert all(text.startswith(texts[0][:16]) for text in texts)


def test_a_second_question_gets_an_answer_of_its_own() -> None:
    with answering_dumps():
        first, second = dump_of(HERE, 2.0), dump_of(HERE, 2.0)
    assert first is not None
    assert second is not None
    assert len(stacks_in_dump(second)) == len(stacks_in_dump(first))


def test_a_signal_that_somebody_else_uses_is_left_to_him() -> None:
    came: list[int] = []
    before = signal.signal(DUMP_SIGNAL, lambda number, frame: came.append(number))
    try:
        with answering_dumps():
            assert dump_of(HERE, 2.0) is None
            signal.raise_signal(DUMP_SIGNAL)
        assert came == [DUMP_SIGNAL]
    finally:
        signal.signal(DUMP_SIGNAL, before)


def test_a_process_that_is_not_there_gives_nothing() -> None:
    assert not Path(f"/proc/{1 << 22}").exists()
    assert dump_of(1 << 22, 2.0) is None


def test_a_forked_process_answers_for_itself_whatever_a_thread_of_its_parent_was_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_within, goes, make = threading.Event(), threading.Event(), stack_dumps._dump_file

    def held(name: str) -> IO[bytes]:
        is_within.set()
        assert goes.wait(60.0)
        return make(name)

    def start() -> None:
        with answering_dumps():
            pass

    monkeypatch.setattr(stack_dumps, "_dump_file", held)
    starts = threading.Thread(target=start)
    starts.start()
    assert is_within.wait(60.0)
    monkeypatch.undo()
    _expect_that_a_forked_process_answers()
    goes.set()
    starts.join()


def test_a_process_that_is_forked_while_its_parent_answers_answers_for_itself() -> None:
    with answering_dumps():
        assert _expect_that_a_forked_process_answers() is None
        assert dump_of(HERE, 2.0)


def _expect_that_a_forked_process_answers() -> str | None:
    """Fork a process and look at what it says within a run of its own; return what it said before."""

    def run(pipe: Any) -> None:
        before = dump_of(os.getpid(), 2.0)
        with answering_dumps():
            pipe.send((before, dump_of(os.getpid(), 2.0)))

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
    assert "in run" in said
    return before
