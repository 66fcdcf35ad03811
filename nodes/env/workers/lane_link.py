"""One lane whose environments are in a worker process, seen from here: its socket, and the frames over it."""

import abc
import select
import selectors
import socket
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle
import numpy as np

from rollflow.nodes.env.lane_source import LaneSource
from rollflow.nodes.env.workers.frames import Frame, FrameKind, FrameReader, frame
from rollflow.nodes.env.workers.lane_supervisor import LanePhase, LaneStatus, RaisedError
from rollflow.nodes.env.workers.watch import PHASE_BYTES, Activity, ActivityFlag, call_under_way
from rollflow.nodes.env.workers.worker_process import MOST_FDS
from rollflow.stream.data import errors
from rollflow.stream.data.blocks import SharedBlock, written_block
from rollflow.stream.data.errors import EnvError, RunError
from rollflow.stream.data.packing import unpack
from rollflow.stream.net import backoff
from rollflow.stream.observe.waits import Wait


class LaneLink(LaneStatus, abc.ABC):
    """A lane's worker: the socket to it, and what it is asked for there.

    maker     what its environments are made by, pickled
    node      that the lane is of
    """

    def __init__(self, index: int, maker: Any, node: LaneSource) -> None:
        super().__init__(index, LanePhase.MAKING)
        self.node: Any = node
        self.sock: socket.socket | None = None
        self._maker = _pickled(maker, index)
        self._reader = FrameReader()
        self._activity = ActivityFlag()

    # Requests that each kind of lane has

    @abc.abstractmethod
    def _reset(self) -> None:
        """Have the environments reset, each with a seed of its own, or a rollout begun."""

    @abc.abstractmethod
    def step(self) -> None:
        """Have the environments of a lane that is ready stepped with the actions that it brings."""

    @abc.abstractmethod
    def take(self, answer: Frame) -> bool:
        """Take an answer: True where the worker has done what it was asked for."""

    def go_on(self) -> None:
        """Have the environments of a lane that is waited for reset, if they are made."""
        if self.phase is LanePhase.MADE:
            self._reset()
            self.phase, self.starts = LanePhase.RESETTING, self.starts + 1

    def _taken(self) -> bool:
        """Note that the lane has taken its reset or its step."""
        if self.phase is LanePhase.STEPPING:
            self.made_step(self.node.fragment_length)
        self.phase = LanePhase.READY
        return True

    # Answers to those, which some kinds have differently

    def _fields_of(self, answer: Frame, where: str = "") -> dict[str, Any]:
        """Fields of an answer, beside the rows; deviations of observations are logged."""
        fields: dict[str, Any] = unpack(answer.payload) if answer.payload else {}
        for kind, text in fields.get("deviations", ()):
            self.node.deviations.add(kind, where + text)
        return fields

    @property
    def failure(self) -> Mapping[str, Any] | None:
        """Error that the last answer told of, beside what it gave."""
        return None

    @property
    def has_made_steps(self) -> bool:
        """True once its environments have made a step."""
        return self.lane is not None and self.lane.vector_steps > 0

    @property
    def has_no_step(self) -> bool:
        """True where the lane would have to be made or reset before it could come back with a step."""
        return self.phase is not LanePhase.STEPPING

    @property
    def progress(self) -> tuple[int, Activity]:
        """Count by which the worker shows that it gets on, and its activity."""
        is_stepped = self.phase in (LanePhase.READY, LanePhase.STEPPING)
        return self._activity.turns, self._activity.doing if is_stepped else Activity.RESET

    @property
    def doing(self) -> Wait:
        """What the worker is at right now, without its place and its stack."""
        phase = self.phase
        if phase is LanePhase.LOST:
            return Wait("", "lost", f"is lost, and begins anew in a while: {self.reason}")
        if phase is LanePhase.MAKING:
            return Wait("", "call", "makes its environments", limit="reset", mark=self.starts)
        more = {"calls": 0} if phase is LanePhase.RESETTING else {}
        return call_under_way(self.lane, self.progress, **more)

    @property
    def has_its_turn(self) -> bool:
        """True while a worker that has several lanes is at this one."""
        return self._activity.is_at_work

    @property
    def thread(self) -> int:
        """The native id of the worker's thread that serves the lane; 0: it has not said so yet."""
        return self._activity.thread

    def late_with(self, text: str) -> str:
        """The words for what the worker is late with, and more where it is known."""
        return text

    def fail(self, failure: Mapping[str, Any]) -> int:
        """Take an error that the worker told of: how many transitions are lost by it, those of `lose` left out."""
        return 0

    def release(self) -> None:
        """Release the memory that the worker wrote to."""

    # The socket

    def connect(self, sock: socket.socket, selector: selectors.BaseSelector, handler: Callable[..., Any]) -> None:
        """Take the socket to a new process, and have it watched: the selector gives the handler with its events."""
        sock.setblocking(False)
        selector.register(sock, selectors.EVENT_READ, handler)
        self.sock, self._reader = sock, FrameReader()

    def disconnect(self, selector: selectors.BaseSelector) -> None:
        """Have the socket watched no more."""
        if self.sock is not None:
            selector.unregister(self.sock)
            self.sock = None
            self._activity = ActivityFlag()

    def make(self) -> None:
        """Have the environments made."""
        flag = SharedBlock(PHASE_BYTES)
        self._activity = ActivityFlag(flag.array().view(np.int64))
        self.send(frame(FrameKind.PHASE, number=flag.size), flag.fd)
        flag.close()
        self.send_block(FrameKind.MAKE, self._maker)

    def send_block(self, kind: FrameKind, data: bytes) -> None:
        """Send a frame with bytes in shared memory."""
        block = written_block(data)
        self.send(frame(kind, number=block.size), block.fd)
        block.close()

    def send(self, data: bytes, fd: int = -1) -> None:
        """Send a frame and its descriptor. Where the worker has gone, or takes none for long, `receive` says so.

        Frames are small and few: there is room for them, unless the process is stopped.
        """
        assert self.sock is not None
        try:
            _ = self.sock.send(data) if fd < 0 else socket.send_fds(self.sock, [data], [fd])
        except (BrokenPipeError, ConnectionResetError):
            pass
        except BlockingIOError:
            poll = select.poll()
            poll.register(self.sock, select.POLLOUT)
            if poll.poll(1e3 * backoff.times.close_s):
                self.send(data, fd)
            else:
                self.sock.shutdown(socket.SHUT_RDWR)

    def receive(self) -> list[Frame] | None:
        """The frames that have come; None when the process has gone."""
        if self.sock is None:
            return None
        try:
            data, fds, _, _ = socket.recv_fds(self.sock, 1 << 18, MOST_FDS)
        except BlockingIOError:
            return []
        except OSError:
            return None
        return self._reader.feed(data, fds) if data else None


def _pickled(maker: Any, lane: int) -> bytes:
    try:
        pickled: bytes = cloudpickle.dumps(maker)
    except Exception as error:
        raise EnvError(
            f"the environments of lane {lane} can't be handed to a worker process: {error}; expected an id, or "
            "callables that hold nothing that can't be pickled"
        ).see("pickle") from error
    return pickled


def refusal(raised: RaisedError, link: LaneLink) -> Exception:
    """The error that a worker's answer tells of: one of ours as it is, another as an EnvError or a RunError."""
    kind, text = getattr(errors, raised.type, None), raised.text
    if kind is None:
        kind = EnvError if link.phase is LanePhase.MAKING else RunError
        text = f"{raised.type}: {text}"
    error: Exception = kind(text)
    raised.add_notes_to(error, link.index)
    return error
