"""Server of a worker process: a socket for each of its lanes, frames over it, and environments behind it."""

import abc
import logging
import os
import pickle
import select
import selectors
import signal
import socket
import threading
import traceback
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollflow.nodes.env.multi_agent.lane_envs import LaneEnvs
from rollflow.nodes.env.observation_check import Deviations
from rollflow.nodes.env.stepping import LaneVectorEnv, close_failed, described, takes_one_seed
from rollflow.nodes.env.workers.frames import Frame, FrameKind, frame_with, receive_frame
from rollflow.nodes.env.workers.stand_ins import agents_described
from rollflow.nodes.env.workers.watch import ActivityFlag
from rollflow.nodes.env.workers.worker_process import become_worker
from rollflow.stream.data.blocks import SharedBlock
from rollflow.stream.data.errors import ColumnError, EnvError, RollflowError
from rollflow.stream.data.packing import pack, unpack
from rollflow.stream.data.system import system_module

fcntl = system_module("fcntl")

logger = logging.getLogger(__name__)


class LaneClosed(BaseException):
    """Raised where the other process wants no more of a lane, or has gone."""


class LaneServer(abc.ABC):
    """Serves one lane's socket until it is closed.

    sock    also what the lane is registered by in a selector
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._phase = ActivityFlag()
        self._maker: Any = None
        self._env: Any = None
        self._seeds: Sequence[int] = ()
        self._deviations = Deviations(is_logged=False)

    def serve_next(self) -> bool:
        """Answer the next frame; False: there are no more, and the environments are closed."""
        is_served = False
        try:
            self._answer(self._receive())
            is_served = True
        except LaneClosed:
            pass
        finally:
            if not is_served:
                self._close()
        return is_served

    def mark_work(self, *, is_begun: bool) -> None:
        """Say, where others can see it, that a frame's work begins, or has ended."""
        self._phase.set_at_work(is_begun)

    # Requests that each kind of environments has

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

    def _done(self, payload: bytes) -> bytes:
        """The answer that a frame's work is done; b"" where there is nothing to say beside it."""
        return frame_with(FrameKind.DONE, payload)

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
            fields = unpack(SharedBlock(asked.number, asked.fd).taken().tobytes())
            self._seeds = fields["seeds"]
            self._lay_out(fields)
            return b""
        failed, self._env = self._env, None
        if failed is not None:
            close_failed(failed)
        self._maker = pickle.loads(SharedBlock(asked.number, asked.fd).taken().tobytes())
        self._env = self._maker.lane_env(self._deviations)
        self._phase.set_blended(not self._env.tell_resets(self._phase.turn))
        return frame_with(FrameKind.READY, self._describe(self._env))

    def _describe(self, envs: LaneVectorEnv | LaneEnvs) -> bytes:
        """The payload that describes the environments. Raises EnvError for agents that have no packed form."""
        if isinstance(envs, LaneEnvs):
            fields = agents_described(envs)
        else:
            fields = described(envs.env) | {"takes_one_seed": takes_one_seed(envs.env)}
        try:
            return pack(fields | {"num_envs": envs.num_envs}, "the environments")
        except ColumnError as error:
            raise EnvError(str(error)) from error

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
            self._send(answer)

    def _receive(self) -> Frame:
        """The next frame. Raises LaneClosed where there are no more."""
        try:
            asked = receive_frame(self.sock)
        except (EOFError, OSError) as error:
            raise LaneClosed from error
        if asked.kind is FrameKind.CLOSE:
            raise LaneClosed
        return asked

    def _send(self, data: bytes) -> None:
        """Send a frame. Raises LaneClosed where the other process has gone."""
        try:
            self.sock.sendall(data)
        except OSError as error:
            raise LaneClosed from error

    def _close(self) -> None:
        """Close the environments and the socket."""
        env, self._env = self._env, None
        try:
            if env is not None:
                close_failed(env)
        finally:
            self.sock.close()


def error_described(error: Exception) -> dict[str, Any]:
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
    return frame_with(FrameKind.FAILED, pack(error_described(error) | more))


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


def serve_all(life: int, lanes: Sequence[int], kind: type[LaneServer]) -> None:
    """Serve the lanes whose sockets have these descriptors, in this thread, for as long as the pipe `life` is open.

    It is the process's main thread, which some environments want: asyncio, signals, OpenGL. Lanes take turns in it.
    """
    become_worker("rollflow-worker")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started this process ends it
    end_with_parent(life)
    servers = [kind(socket.socket(fileno=fd)) for fd in lanes]
    if len(servers) > 1:
        _take_turns(servers)
        return
    while servers[0].serve_next():
        pass


def _take_turns(servers: Sequence[LaneServer]) -> None:
    """Serve several lanes, a frame of each at a time, and mark the one that is at work."""
    with selectors.DefaultSelector() as selector:
        for server in servers:
            selector.register(server.sock, selectors.EVENT_READ, server)
        while selector.get_map():
            for key, _ in selector.select():
                served: LaneServer = key.data
                served.mark_work(is_begun=True)
                if not served.serve_next():
                    selector.unregister(key.fileobj)
                served.mark_work(is_begun=False)
