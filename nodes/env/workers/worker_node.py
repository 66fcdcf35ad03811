"""Worker processes of lanes: started, asked over a socket for each lane, heard, given up and started again."""

import abc
import logging
import select
import selectors
import socket
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from multiprocessing import connection
from typing import Any

import numpy as np

from rollflow.nodes.env.env_source import count_of, sizes_of
from rollflow.nodes.env.lane_source import LaneSource
from rollflow.nodes.env.workers.frames import Frame, FrameKind, FrameReader, frame
from rollflow.nodes.env.workers.lane_status import LanePhase, LaneStatus, RaisedError
from rollflow.nodes.env.workers.lanes_elsewhere import LanesElsewhere
from rollflow.nodes.env.workers.stand_ins import stand_in_for
from rollflow.nodes.env.workers.watch import COUNTER_BYTES, Activity, ActivityFlag, ProgressMark, call_under_way
from rollflow.nodes.env.workers.worker_process import MOST_FDS, WorkerProcess, core_count, end_all, pickled
from rollflow.stream.data import errors
from rollflow.stream.data.blocks import SharedBlock, written_block
from rollflow.stream.data.errors import EnvError, RunError
from rollflow.stream.data.packing import unpack
from rollflow.stream.data.system import require
from rollflow.stream.net import backoff
from rollflow.stream.observe.waits import Wait

logger = logging.getLogger(__name__)

_ROOM_MS = 1000  # how long a frame may wait for a worker that reads none


class LaneLink(LaneStatus, abc.ABC):
    """A lane's worker: the socket to it, and what it is asked for there.

    maker       what its environments are made by, pickled
    node        that the lane is of
    activity    of its environments, as the worker says it
    worker      its process, and the lanes that share it
    failure     error that the last answer told of, beside what it gave; None: of none
    """

    worker: "Worker"
    failure: Mapping[str, Any] | None = None

    def __init__(self, index: int, maker: Any, node: LaneSource) -> None:
        super().__init__(index, LanePhase.MAKING)
        self.node: Any = node
        self.sock: socket.socket | None = None
        self._maker = pickled(maker, [(f"the environments of {self.name}", maker)])
        self._reader = FrameReader()
        self.activity = ActivityFlag()

    # Requests that each kind of lane has

    @abc.abstractmethod
    def _reset(self) -> None:
        """Have the environments reset, each with a seed of its own, or a rollout begun."""

    @abc.abstractmethod
    def step(self) -> None:
        """Have the environments of a lane that is ready stepped with the actions that it brings."""

    @abc.abstractmethod
    def take(self, answer: Frame) -> bool:
        """Take an answer: True if the worker has done what it was asked for."""

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
    def has_no_step(self) -> bool:
        """True if the lane would have to be made or reset before it could come back with a step."""
        return self.phase is not LanePhase.STEPPING

    @property
    def progress(self) -> tuple[int, Activity]:
        """Count by which the worker shows that it gets on, and its activity."""
        is_stepped = self.phase in (LanePhase.READY, LanePhase.STEPPING)
        return self.activity.turns, self.activity.doing if is_stepped else Activity.RESET

    @property
    def doing(self) -> Wait:
        """What the worker is at right now, without its place and its stack."""
        phase = self.phase
        if phase is LanePhase.LOST:
            text = f"is lost, and begins anew in a while: {self.reason}"
            return Wait("", "lost", text, age_s=backoff.times.clock() - self.noted_at)
        if phase is LanePhase.MAKING:
            return Wait("", "call", "makes its environments", limit="reset", mark=self.starts)
        more = {"calls": 0} if phase is LanePhase.RESETTING else {}
        return call_under_way(self.lane, self.progress, **more)

    def late_with(self, text: str) -> str:
        """The words for what the worker is late with, and more if it is known."""
        return text

    def states_in(self, fields: Mapping[str, Any]) -> Any:
        """The states of the environments in an answer."""
        return fields["environments"]

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
            self.activity = ActivityFlag()

    def make(self) -> None:
        """Have the environments made."""
        flag = SharedBlock(COUNTER_BYTES)
        self.activity = ActivityFlag(flag.array().view(np.int64))
        self.send(frame(FrameKind.PHASE, number=flag.size), flag.fd)
        flag.close()
        self.send_block(FrameKind.MAKE, self._maker)

    def send_block(self, kind: FrameKind, data: bytes) -> None:
        """Send a frame with bytes in shared memory."""
        block = written_block(data)
        self.send(frame(kind, number=block.size), block.fd)
        block.close()

    def send(self, data: bytes, fd: int = -1) -> None:
        """Send a frame and its descriptor. Where the worker has gone, `receive` says so.

        A socket without room has hundreds of frames, and a worker that reads takes them at once: one that does not has
        its socket closed, and so is lost.
        """
        assert self.sock is not None
        try:
            _ = self.sock.send(data) if fd < 0 else socket.send_fds(self.sock, [data], [fd])
        except BlockingIOError:
            room = select.poll()
            room.register(self.sock, select.POLLOUT)
            if room.poll(_ROOM_MS):
                self.send(data, fd)
            else:
                self.sock.shutdown(socket.SHUT_RDWR)
        except (BrokenPipeError, ConnectionResetError):
            pass

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


def is_readable(sock: socket.socket | None, seconds: float | None) -> bool:
    """Wait until there is something to be read, for so many seconds; None: for ever. False: there is nothing."""
    assert sock is not None
    ready = select.poll()
    ready.register(sock, select.POLLIN)
    return bool(ready.poll(None if seconds is None else 1000 * seconds))


def refusal(raised: RaisedError, link: LaneLink) -> Exception:
    """The error that a worker's answer tells of: one of ours as it is, another as an EnvError or a RunError."""
    kind, text = getattr(errors, raised.type, None), raised.text
    if kind is None:
        kind = EnvError if link.phase is LanePhase.MAKING else RunError
        text = f"{raised.type}: {text}"
    error: Exception = kind(text)
    raised.add_notes_to(error, link.name)
    return error


@dataclass(slots=True, eq=False)
class Worker:
    """Lanes that share a process, which is None while it is lost."""

    links: list[LaneLink] = field(default_factory=list)
    process: WorkerProcess | None = None

    def at_work(self, link: LaneLink) -> LaneLink:
        """The lane that the process is at, if that is another one, else the lane itself."""
        if len(self.links) == 1 or link.activity.is_at_work:
            return link
        return next((each for each in self.links if each.activity.is_at_work), link)


class WorkerNode(LanesElsewhere):
    """A node whose lanes are in worker processes, over socket pairs.

        workers    processes; several lanes in one take turns in its main thread. None: one for each core, but no more
                   than lanes

        program    module that a worker runs
        link_of    makes the link to a lane's worker, of the lane's number, what makes its environments, and the node

    A lane is lost when its process ends, hangs, or its environment raises. Its open episodes end as truncated, and the
    lane is made again after a while, longer each time. A lane that is set aside gives the fragment that it has begun,
    and no more. Only if no lane is left does the run end, with an EnvError that says why each was lost. Where the
    environments of every lane raise before any has made a step, it ends at once: the next try would fail as well.
    """

    program: str
    link_of: Callable[[int, Any, LaneSource], LaneLink]
    remotes: list[LaneLink]

    def __init__(self, env: Any, *, workers: int | None = None, **options: Any) -> None:
        require("a rollout in worker processes", (socket, "AF_UNIX"), (socket, "send_fds"), (select, "poll"))
        self._asked_workers = workers
        self._workers: list[Worker] = []
        self._logged: deque[str] = deque(maxlen=16)  # tracebacks, each of which is logged once
        # With functions of this class, which take the node, and nothing that refers to the node itself.
        self._selector = selectors.DefaultSelector()
        self._ending = weakref.finalize(self, _end, self._workers, self._selector)
        super().__init__(env, **options)

    def _made(self, env: Any, num_envs: int | None, lanes: int | None) -> Sequence[Any]:
        """Have processes make the environments of every lane: stand-ins for them.

        Raises EnvError if they can't be made, or not in time, and for those that have been made already.
        """
        makers = self.kind.makers(env, num_envs, lanes, self._autoreset_mode)
        if not all(maker.can_travel for maker in makers):
            raise EnvError(
                "worker processes make the environments themselves: expected an id, a callable, or a list of callables "
                "instead of a vector environment that has been made already"
            ).see("pickle")
        itself: Any = weakref.proxy(self)  # which holds the links
        self.remotes += [self.link_of(lane, maker, itself) for lane, maker in enumerate(makers)]
        left, asked, most = iter(self.remotes), self._asked_workers or core_count(), len(makers)
        if self._asked_workers and asked > most:
            lanes = min(asked, count_of(env, num_envs))
            more = f"; lanes={lanes} would use {lanes}" if lanes > most else ""
            logger.warning("workers=%d, but each of %d lanes is in one worker: %d run%s", asked, most, most, more)
        for size in sizes_of(most, min(asked, most)):
            self._workers.append(worker := Worker(list(islice(left, size))))
            for link in worker.links:
                link.worker = worker
        logger.info("starting %d worker process%s", self.num_workers, "es" if self.num_workers > 1 else "")
        for worker in self._workers:
            self._start_process(worker)
        return [stand_in_for(self._first_answer(link)) for link in self.remotes]

    def fileno(self) -> int:
        """A descriptor that can be read once a worker has something to say."""
        return self._selector.fileno()

    @property
    def num_workers(self) -> int:
        """Worker processes."""
        return len(self._workers)

    def describe(self) -> str:
        """Lanes, slots and the number of processes, for `explain()`."""
        return f"{super().describe()}, in {len(self._workers)} worker process{'es' if len(self._workers) > 1 else ''}"

    def get_state(self) -> list[Any]:
        """The states of every lane's environments, which their workers are asked for. While none steps.

        Raises what a worker could not say. One that says nothing for the time of a reset is ended, and begins anew.
        """
        asked = [link for link in self.remotes if link.phase is LanePhase.READY]
        for link in asked:
            link.send(frame(FrameKind.STATE))
        states = {link.index: self._state_of(link) for link in asked}
        if failed := [each for each in states.values() if isinstance(each, Exception)]:
            raise failed[0]
        lost = "its worker process was lost"
        restart = [[{"restart": link.reason or lost}] if link.starts else [] for link in self.remotes]
        return [states.get(link.index) or anew for link, anew in zip(self.remotes, restart, strict=True)]

    def _state_of(self, link: LaneLink) -> Any:
        """What a lane's worker says of its environments, or the error that it tells of; None: it is lost."""
        while link.phase is LanePhase.READY and (frames := link.receive()) is not None:
            for answer in frames:
                if answer.kind is FrameKind.FAILED:
                    return refusal(RaisedError.in_fields(unpack(answer.payload)), link)
                if answer.kind is FrameKind.DONE:
                    return link.states_in(unpack(answer.payload))
                link.take(answer)
            if frames:
                continue
            if not is_readable(link.sock, self.reset_timeout):
                text = f"the state of its environments was not said for {self.reset_timeout:g} s"
                for _ in self._process_lost(link.worker, {each.index: text for each in link.worker.links}):
                    pass  # no lane is waited for
        return None

    # For `LanesElsewhere`

    def progress(self, lane: int) -> ProgressMark:
        """A lane's; while its worker is at another lane that of the other: the time of its own is yet to begin."""
        link = self.remotes[lane]
        worker = link.worker
        if len(worker.links) == 1:
            return link.progress
        link = worker.at_work(link)
        turns, activity = link.progress
        return turns * len(self.remotes) + link.index, activity  # which says as well whose it is

    def ask(self, remote: LaneLink) -> None:
        self.begin(remote, LanePhase.STEPPING)  # before the worker can get on: all that it makes counts
        remote.step()

    def _go_on(self, remote: LaneLink) -> None:
        remote.go_on()
        self.watch(remote)

    def _set_out(self, remote: LaneLink) -> Iterator[Any]:
        worker = remote.worker
        if worker.process is None:
            self._start_process(worker)
        else:
            self._make(remote)
        return iter(())

    def _heard(self) -> Iterator[Any]:
        for key, _ in self._selector.select(0):
            yield from key.data(self)

    def _late(self, remote: LaneLink, text: str) -> Iterator[Any]:
        """Kill the process of a lane that is late: all its lanes are lost."""
        worker = remote.worker
        link = worker.at_work(remote)
        reason = link.late_with(text)
        lanes = [each.index for each in worker.links if each.phase is not LanePhase.ASIDE]
        if len(lanes) > 1 and worker.process is not None:
            shared = ", ".join(map(str, lanes))
            reason = f"{reason}; lanes {shared} share worker process {worker.process.pid}, which is killed"
        told = {lane: reason if lane == link.index else f"{link.name} gave {reason}" for lane in lanes}
        yield from self._process_lost(worker, told)

    def _leave(self, remote: LaneLink) -> Iterator[Any]:
        yield from super()._leave(remote)
        self.check_any_left()

    def _waits_for(self, remote: LaneLink, name: str, began: float | None, age_s: float) -> Iterator[Wait]:
        worker, doing = remote.worker, remote.doing
        at_work, process = worker.at_work(remote), worker.process
        if at_work is not remote and at_work.is_waited:
            return  # the worker is at another of its lanes
        text, remedy, pid = doing.doing, "", "no process"
        if process is not None:
            pid, remedy = f"pid {process.pid}", "have it return; Timeouts(step=…) ends the worker, which begins anew"
            if process.is_stopped:
                text, remedy = "is stopped, as by SIGSTOP", f"kill -CONT {process.pid}, or find out who stopped it"
        yield replace(
            doing,
            party=name,
            doing=text,
            mark=(doing.mark, began),
            age_s=doing.age_s or age_s,
            where=f"{remote.name}, worker {self._workers.index(worker)}, {pid}",
            remedy="" if doing.kind == "lost" else remedy,
            stack=tuple if process is None else partial(process.stack_of, remote.activity.thread),
        )

    def _end(self) -> None:
        """End the worker processes, each of which logs what closing its environments raises."""
        for link in self.remotes:
            link.disconnect(self._selector)
        self._ending()

    def _release(self) -> None:
        super()._release()
        for link in self.remotes:
            link.release()

    # Answers

    def _heard_from(self, link: LaneLink) -> Iterator[Any]:
        frames = link.receive()
        if frames is None:
            yield from self._process_lost(link.worker)
        else:
            yield from self._all_answered(link, frames)

    def _all_answered(self, link: LaneLink, frames: Sequence[Frame]) -> Iterator[Any]:
        for answer in frames:
            if link.phase is LanePhase.ASIDE:
                answer.discard()
            else:
                yield from self._answered(link, answer)

    def _answered(self, link: LaneLink, answer: Frame) -> Iterator[Any]:
        if answer.kind is FrameKind.FAILED:
            yield from self._failed(link, unpack(answer.payload))
        elif answer.kind is FrameKind.READY:
            link.phase = LanePhase.MADE
            if link.is_waited:
                link.go_on()
        elif link.take(answer):
            yield self.come_back(link)
            if link.failure is not None:
                yield from self._failed(link, link.failure)
        elif answer.kind is FrameKind.BEGUN:
            self.begin(link, LanePhase.STEPPING)

    def _has_ended(self, worker: Worker, process: WorkerProcess) -> Iterator[Any]:
        """Take what a process said before it ended. If it has forked others, its sockets may never be closed."""
        for link in worker.links:
            while worker.process is process and (frames := link.receive()):
                yield from self._all_answered(link, frames)
        if worker.process is process:
            yield from self._process_lost(worker)

    # Losses

    def _failed(self, link: LaneLink, failure: Mapping[str, Any]) -> Iterator[Any]:
        self.lost_steps += link.fail(failure)
        raised = RaisedError.in_fields(failure)
        # Environments that have been made before may well be made again: that they can't be now is a loss.
        if link.phase is not LanePhase.MAKING:
            if raised.is_refusal:
                raise refusal(raised, link)
            link.raised = raised
            self.check_first_errors()
        told = "" if raised.traceback in self._logged else f"\n{raised.traceback}"
        if told:
            self._logged.append(raised.traceback)
        self.give_up(link, f"{raised.type}: {raised.text}")
        yield from self.begin_anew_or_leave(link, told)

    def _process_lost(self, worker: Worker, reasons: Mapping[int, str] | None = None) -> Iterator[Any]:
        """Give up a process, for reasons by lane, or because it has ended."""
        process, worker.process = worker.process, None
        if process is None:
            return
        for link in worker.links:
            link.disconnect(self._selector)
        if process.fileno() >= 0:
            self._selector.unregister(process)
        ended = "" if reasons else f"process {process.pid} {process.ended()}"
        process.kill()
        for link in worker.links:
            if link.phase not in (LanePhase.LOST, LanePhase.ASIDE):
                self.give_up(link, reasons[link.index] if reasons else ended)
                yield from self.begin_anew_or_leave(link)

    # Processes

    def _make(self, link: LaneLink) -> None:
        link.make()
        self.begin(link, LanePhase.MAKING)

    def _start_process(self, worker: Worker) -> None:
        links = [link for link in worker.links if link.phase is not LanePhase.ASIDE]
        process = worker.process = WorkerProcess(self.program, len(links), preload=self.program)
        if process.fileno() >= 0:
            handler = partial(WorkerNode._has_ended, worker=worker, process=process)
            self._selector.register(process, selectors.EVENT_READ, handler)
        for link, sock in zip(links, process.sockets, strict=True):
            link.connect(sock, self._selector, partial(WorkerNode._heard_from, link=link))
            self._make(link)

    def _first_answer(self, link: LaneLink) -> dict[str, Any]:
        """A worker's description of the environments that it has made. Raises EnvError when it could not."""
        timeout, process = self.reset_timeout, link.worker.process
        assert process is not None
        until = None if timeout is None else backoff.times.clock() + timeout
        watched: list[Any] = [link.sock, process] if process.fileno() >= 0 else [link.sock]
        while not (frames := link.receive()):
            if frames is None or process.has_ended(0):
                ended = f"{process.pid} {process.ended()}"
                raise EnvError(f"{link.name}: process {ended} before it had made the environments").see("worker")
            left = None if until is None else until - backoff.times.clock()
            if left is not None and left <= 0:
                within = f"{timeout:g} s, Timeouts(reset=…), the start of their process included"
                raise EnvError(f"{link.name}: the environments were not made within {within}").see("timeout")
            connection.wait(watched, left)
        description: dict[str, Any] = unpack(frames[0].payload)
        if frames[0].kind is FrameKind.FAILED:
            raise refusal(RaisedError.in_fields(description), link)
        link.phase = LanePhase.MADE
        return description


def _end(workers: Sequence[Worker], selector: selectors.BaseSelector) -> None:
    end_all([worker.process for worker in workers if worker.process is not None])
    selector.close()
    for worker in workers:
        worker.links.clear()  # which refer to it: their memory goes now, and not at a later collection
