"""Sinks of datasets that are held, or killed, while they write."""

import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollflow import DatasetSink
from rollflow.sinks.datasets.dataset_sink import FileSet


def held_writes(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let sinks write from the moment on at which the event is set."""
    may_write, write = threading.Event(), FileSet.write

    def held_back(*args: Any) -> None:
        assert may_write.wait(30)
        write(*args)

    monkeypatch.setattr(FileSet, "write", held_back)
    return may_write


def write_and_be_killed(fragments: Sequence[Any], path: Path, max_file_bytes: int, calls: int) -> None:
    """Write in a forked process that is killed once it has handed over so many fragments, while others are written."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        try:
            sink = DatasetSink(path, max_file_bytes=max_file_bytes)
            for fragment in fragments:
                sink(fragment)
                os.write(writes, b".")
            signal.pause()
        finally:
            os._exit(1)
    os.close(writes)
    for _ in range(calls):
        assert os.read(reads, 1)
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    os.close(reads)
