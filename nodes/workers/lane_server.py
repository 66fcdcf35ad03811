"""What every worker process does for its lanes, whatever it has them do: one socket each, and frames over it."""

import abc
import contextlib
import fcntl
import os
import pickle
import select
import signal
import socket
import threading
import traceback
from collections.abc import Sequence
from typing import Any

import numpy as np

from rollflow.nodes.workers.frames import Frame, Kind, frame_with, receive_frame
from rollflow.nodes.workers.phase import Phase
from rollflow.nodes.workers.worker_process import become_worker
from rollflow.stream.blocks import SharedBlock
from rollflow.stream.errors import RollflowError
from rollflow.stream.packing import pack

_loading = threading.Lock()


class LaneServer(abc.ABC):
    """Serves one lane's socket until it is closed."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._phase = Phase()

    def serve(self) -> None:
        """Answer frame after frame."""
        try:
            while (asked := receive_frame(self._sock)).kind is not Kind.CLOSE:
                self._answer(asked)
        except (EOFError, OSError):
            pass  # the other process has gone
        finally:
            self._close_env()
            self._sock.close()

    @abc.abstractmethod
    def _do(self, asked: Frame) -> bytes:
        """Do what a frame asks for, and give the answer; b"" where there is none."""

    @abc.abstractmethod
    def _close(self) -> None:
        """Close the environments, where there are any."""

    def _answer(self, asked: Frame) -> None:
        if asked.kind is Kind.PHASE:
            self._phase = Phase(SharedBlock(asked.number, asked.fd).taken().view(np.int64))
            return
        try:
            answer = self._do(asked)
        except Exception as error:
            answer = failure(error)
        if answer:
            self._sock.sendall(answer)

    def _close_env(self) -> None:
        with contextlib.suppress(Exception):  # it may be what has failed
            self._close()


def loaded(asked: Frame) -> Any:
    """What was pickled into the block that came with a frame."""
    with _loading:  # a module whose import fails in one thread is a KeyError in the others
        return pickle.loads(SharedBlock(asked.number, asked.fd).taken().tobytes())


def described(error: Exception) -> dict[str, Any]:
    """An error, in words."""
    return {
        "type": type(error).__name__,
        "text": str(error),
        "notes": list(getattr(error, "__notes__", [])),
        "traceback": "".join(traceback.format_exception(error)),
        "is_refusal": isinstance(error, RollflowError),
    }


def failure(error: Exception, **more: Any) -> bytes:
    """The frame that tells of an error."""
    return frame_with(Kind.FAILED, pack(described(error) | more))


def end_with_parent(fd: int) -> None:
    """End this process's group when the other end of a pipe is closed, whatever it is doing then.

    The kernel sends the signal, so that it comes through even where the interpreter never gets its turn, and to what
    environments have forked as well.
    """
    fcntl.fcntl(fd, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    signal.signal(signal.SIGIO, signal.SIG_DFL)  # to be killed by it
    poll = select.poll()
    poll.register(fd, 0)
    if poll.poll(0):  # it was closed before anybody was asked to tell
        os.killpg(0, signal.SIGIO)


def serve_all(life: int, servers: Sequence[LaneServer]) -> None:
    """Serve all lanes, for as long as the pipe `life` is open."""
    become_worker()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started this process ends it
    end_with_parent(life)
    threads = [threading.Thread(target=server.serve) for server in servers[1:]]
    for thread in threads:
        thread.start()
    servers[0].serve()
    for thread in threads:
        thread.join()
