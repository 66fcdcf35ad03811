"""Server of a worker process: a socket for each of its lanes, frames over it, and environments behind it."""

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
from numpy.typing import NDArray

from rollflow.nodes.env.observation_check import Deviations
from rollflow.nodes.env.workers.frames import Frame, FrameKind, frame_with, receive_frame
from rollflow.nodes.env.workers.watch import ActivityFlag
from rollflow.nodes.env.workers.worker_process import become_worker
from rollflow.stream.data.blocks import SharedBlock
from rollflow.stream.data.errors import RollflowError
from rollflow.stream.data.packing import pack, unpack

_loading = threading.Lock()


class LaneServer(abc.ABC):
    """Serves one lane's socket until it is closed."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._phase = ActivityFlag()
        self._env: Any = None
        self._seeds: Sequence[int] = ()
        self._deviations = Deviations(is_logged=False)

    def serve(self) -> None:
        """Answer frame after frame."""
        try:
            while (asked := receive_frame(self._sock)).kind is not FrameKind.CLOSE:
                self._answer(asked)
        except (EOFError, OSError):
            pass  # the other process has gone
        finally:
            self._close_env()
            self._sock.close()

    # Requests that each kind of environments has

    @abc.abstractmethod
    def _describe(self, maker: Any) -> bytes:
        """The payload that describes the environments, which the maker has made."""

    def _lay_out(self, fields: dict[str, Any]) -> None:  # noqa: B027
        """Take the layout of blocks, where the environments don't say it themselves."""

    @abc.abstractmethod
    def _take_block(self, index: int, memory: NDArray[np.uint8]) -> None:
        """Take a block, u8[...], that steps are read from and written to."""

    @abc.abstractmethod
    def _reset(self, asked: Frame) -> bytes:
        """Reset the environments: the answer."""

    @abc.abstractmethod
    def _step(self, asked: Frame) -> bytes:
        """Step the environments: the answer."""

    # Inside

    def _do(self, asked: Frame) -> bytes:
        """Do what a frame asks for, and give the answer; b"" where there is none."""
        kind = asked.kind
        if kind is FrameKind.STEP or kind is FrameKind.STEP_FOR_ENV:
            return self._step(asked)
        if kind is FrameKind.RESET:
            return self._reset(asked)
        if kind is FrameKind.BLOCK:
            self._take_block(asked.block, SharedBlock(asked.number, asked.fd).taken())
            return b""
        if kind is FrameKind.LAYOUT:
            fields = unpack(asked.payload)
            self._seeds = fields["seeds"]
            self._lay_out(fields)
            return b""
        self._close_env()
        maker = _loaded(asked)
        self._env = maker.lane_env(self._deviations)
        self._phase.set_blended(not self._env.tell_resets(self._phase.turn))
        return frame_with(FrameKind.READY, self._describe(maker))

    def _answer(self, asked: Frame) -> None:
        if asked.kind is FrameKind.PHASE:
            self._phase = ActivityFlag(SharedBlock(asked.number, asked.fd).taken().view(np.int64))
            self._phase.set_thread(threading.get_native_id())
            return
        try:
            answer = self._do(asked)
        except Exception as error:
            answer = failure(error)
        if answer:
            self._sock.sendall(answer)

    def _close_env(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            with contextlib.suppress(Exception):  # it may be what has failed
                env.close()


def _loaded(asked: Frame) -> Any:
    """Unpickle the block that came with a frame."""
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
    return frame_with(FrameKind.FAILED, pack(described(error) | more))


def end_with_parent(fd: int) -> None:
    """End this process's group when the other end of a pipe is closed, whatever it is doing then.

    The kernel sends the signal, so that it comes through even where the interpreter never gets its turn, and to what
    environments have forked as well. On Linux it is SIGKILL, which ends a process that is stopped too.
    """
    fcntl.fcntl(fd, fcntl.F_SETOWN, -os.getpgrp())
    if hasattr(fcntl, "F_SETSIG"):
        ending: int = signal.SIGKILL
        fcntl.fcntl(fd, fcntl.F_SETSIG, ending)
    else:
        ending = signal.SIGIO
        signal.signal(ending, signal.SIG_DFL)  # to be killed by it
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(fd, 0)
    if poll.poll(0):  # it was closed before anybody was asked to tell
        os.killpg(0, ending)


def serve_all(life: int, servers: Sequence[LaneServer]) -> None:
    """Serve all lanes, for as long as the pipe `life` is open."""
    become_worker("rollflow-worker")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started this process ends it
    end_with_parent(life)
    threads = [threading.Thread(target=server.serve) for server in servers[1:]]
    for thread in threads:
        thread.start()
    servers[0].serve()
    for thread in threads:
        thread.join()
