"""Worker processes of lanes: started, asked, heard, given up and started again."""

import logging
import select
import selectors
import socket
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing import connection
from typing import Any

from rollflow.nodes.closing import closing_on_error
from rollflow.nodes.env.env_source import sizes_of
from rollflow.nodes.env.workers.frames import Frame, FrameKind, frame
from rollflow.nodes.env.workers.lane_link import LaneLink, raised_in_worker, refusal
from rollflow.nodes.env.workers.lane_supervisor import LaneLimits, LanePhase, LaneSupervisor
from rollflow.nodes.env.workers.stand_ins import stand_in_for
from rollflow.nodes.env.workers.supervised_source import L, SupervisedSource
from rollflow.nodes.env.workers.watch import ProgressMark
from rollflow.nodes.env.workers.worker_process import WorkerProcess, core_count, end_all
from rollflow.stream.data.errors import EnvError
from rollflow.stream.data.packing import unpack
from rollflow.stream.data.system import require
from rollflow.stream.net import backoff
from rollflow.stream.observe.stacks import StackFrame
from rollflow.stream.observe.waits import Wait

logger = logging.getLogger(__name__)


class WorkerNode(SupervisedSource):
    """A node whose lanes are in worker processes, over socket pairs.

        workers    processes; several lanes in one take turns in its main thread. None: one for each core, but no more
                   than lanes

        program    module that a worker runs
        link_of    makes the link to a lane's worker, of the lane's status, what makes its environments, and the node
        links      to the lanes' workers, in the lanes' order

    A lane is lost when its process ends, hangs, or its environment raises. Its open episodes end as truncated, and the
    lane is made again after a while, longer each time. A lane that is set aside gives the fragment that it has begun,
    and no more. Only where no lane is left does the run end, with an EnvError that says why each was lost. Where the
    environments of every lane raise before any has made a step, it ends at once: the next try would fail as well.
    """

    program: str
    link_of: type[LaneLink]

    def __init__(self, env: Any, *, workers: int | None = None, **options: Any) -> None:
        require("a rollout in worker processes", (socket, "AF_UNIX"), (socket, "send_fds"), (select, "poll"))
        self.links: list[LaneLink] = []
        self._others: list[list[LaneLink]] = []  # of every lane: the other lanes of its worker
        self.supervisor = LaneSupervisor(
            LaneLimits.taken_from(options), partial(_progress_of, self.links, self._others)
        )
        self._asked_workers = workers
        self._workers: dict[int, WorkerProcess | None] = {}  # by the index of their first lane
        self._first_of: list[int] = []  # of every lane: the first lane of its worker
        self._without_step: deque[LaneLink] = deque()  # links of lanes that are to come back as they are
        self._logged: deque[str] = deque(maxlen=16)  # tracebacks, each of which is logged once
        # With functions of this class, which take the node, and nothing that refers to the node itself.
        self._selector = selectors.DefaultSelector()
        self._ending = weakref.finalize(self, _end, self._workers, self._selector)
        with closing_on_error(self._end_workers):
            super().__init__(env, **options)

    def _made(self, env: Any, num_envs: int | None, lanes: int | None) -> Sequence[Any]:
        """Have processes make the environments of every lane: stand-ins for them.

        Raises EnvError where they can't be made, or not in time, and for those that have been made already.
        """
        makers = self._makers(env, num_envs, lanes)
        if not all(maker.can_travel for maker in makers):
            raise EnvError(
                "worker processes make the environments themselves: expected an id, a callable, or a list of callables "
                "instead of a vector environment that has been made already"
            ).see("pickle")
        itself: Any = weakref.proxy(self)  # which holds the links
        for maker in makers:
            self.links.append(self.link_of(self.supervisor.add(LanePhase.MAKING), maker, itself))
        count = min(self._asked_workers or core_count(), len(makers))
        for size in sizes_of(len(makers), count):
            self._first_of += [len(self._first_of)] * size
        for link in self.links:
            self._others.append([each for each in self._links_of(self._first_of[link.index]) if each is not link])
        for first in sorted(set(self._first_of)):
            self._start_process(first)
        return [stand_in_for(self._first_answer(link)) for link in self.links]

    def start(self) -> Iterator[Any]:
        """Have the environments of every lane reset, all at a time; the lanes come by `completed`.

        Raises RunError a second time.
        """
        self._begin()
        for link, lane in zip(self.links, self.lanes, strict=True):
            link.lane = lane
            self.supervisor.wait_for(link.status)
            link.go_on()
            self.supervisor.watch(link.status)
        return iter(())

    def hand_over(self, lane: L) -> L | None:
        """Have a lane's worker step its environments with the actions that it brings."""
        link = self.links[lane.index]
        self.supervisor.wait_for(link.status)
        if link.status.phase is LanePhase.READY and (link.steps_while_draining or not self.supervisor.is_draining):
            self.supervisor.watch(link.status)  # before the worker can get on: all that it makes counts
            link.step()
            return None
        # The worker was lost while the lane was somewhere else: no step is under way.
        self.supervisor.lost_steps += link.lose_idle(link.status.reason)
        if link.status.phase is LanePhase.ASIDE or self.supervisor.is_draining:
            self.supervisor.set_aside(link.status)  # so that no loss brings it back as well
            self._without_step.append(link)
        else:
            link.go_on()
            self.supervisor.watch(link.status)
        return None

    def hasten(self) -> None:
        """Have those lanes come back at once that have no environments to step; from now on none is made again."""
        self.supervisor.is_draining = True
        for link in self.links:
            if link.status.is_waited and link.has_no_step:
                self.supervisor.set_aside(link.status)
                self._without_step.append(link)

    def fileno(self) -> int:
        """A descriptor that can be read once a worker has something to say."""
        return self._selector.fileno()

    def _completed(self) -> Iterator[Any]:
        while self._without_step:
            yield from self._set_aside(self._without_step.popleft())
        for key, _ in self._selector.select(0):
            yield from key.data(self)
        for index, text in self.supervisor.deadlines.overdue().items():
            yield from self._process_lost(self._first_of[index], self._late(self.links[index], text))
        for status in self.supervisor.due():
            first = self._first_of[status.index]
            if self._workers[first] is None:
                self._start_process(first)
            else:
                self._make(self.links[status.index])

    @property
    def num_workers(self) -> int:
        """Worker processes."""
        return len(self._workers)

    def describe(self) -> str:
        """Lanes, slots and the number of processes, for `explain()`."""
        return f"{super().describe()}, in {len(self._workers)} worker process{'es' if len(self._workers) > 1 else ''}"

    @property
    def lanes_at_work(self) -> set[int]:
        """Numbers of the lanes that make steps, or should. From any thread."""
        return {link.index for link in list(self.links) if link.status.is_at_work}

    def at_work(self, name: str) -> Iterator[Wait]:
        """What the worker of every lane that is waited for is at right now. From any thread."""
        places = {first: place for place, first in enumerate(sorted(set(self._first_of)))}
        for link in list(self.links):
            at_work = _at_work(link, self._others)
            if not link.status.is_waited or (at_work is not link and at_work.status.is_waited):
                continue  # the worker is at another of its lanes
            first, doing = self._first_of[link.index], link.doing
            worker, began = self._workers.get(first), self.supervisor.deadlines.began.get(link.index)
            text, remedy, pid = doing.doing, "", "no process"
            if worker is not None:
                pid, remedy = f"pid {worker.pid}", "have it return; Timeouts(step=…) ends the worker, which begins anew"
                if worker.is_stopped:
                    text, remedy = "is stopped, as by SIGSTOP", f"kill -CONT {worker.pid}, or find out who stopped it"
            yield replace(
                doing,
                party=name,
                doing=text,
                mark=(doing.mark, began),
                age_s=doing.age_s or (0.0 if began is None else max(0.0, backoff.times.clock() - began)),
                where=f"lane {link.index}, worker {places[first]}, {pid}",
                remedy="" if doing.kind == "lost" else remedy,
                stack=partial(_stack_of, worker, link.thread),
            )

    def close(self) -> None:
        """End the worker processes, each of which logs what closing its environments raises, and release the memory."""
        self.is_closed = True
        try:
            self._end_workers()
        finally:
            self._release()

    def _release(self) -> None:
        super()._release()
        for link in self.links:
            link.release()

    def _end_workers(self) -> None:
        for link in self.links:
            link.disconnect(self._selector)
        self._ending()

    # Answers

    def _heard(self, index: int) -> Iterator[Any]:
        link = self.links[index]
        link.send_kept()
        frames = link.receive()
        if frames is None:
            yield from self._process_lost(self._first_of[index])
        else:
            yield from self._all_answered(link, frames)

    def _all_answered(self, link: LaneLink, frames: Sequence[Frame]) -> Iterator[Any]:
        for answer in frames:
            if link.status.phase is LanePhase.ASIDE:
                answer.discard()
            else:
                yield from self._answered(link, answer)

    def _answered(self, link: LaneLink, answer: Frame) -> Iterator[Any]:
        status = link.status
        if answer.kind is FrameKind.FAILED:
            yield from self._failed(link, unpack(answer.payload))
        elif answer.kind is FrameKind.READY:
            status.phase = LanePhase.MADE
            if status.is_waited:
                link.go_on()
        elif link.take(answer):
            self.supervisor.come_back(status)
            yield link.lane
            if link.failure is not None:
                yield from self._failed(link, link.failure)
        elif answer.kind is FrameKind.BEGUN:
            self.supervisor.begin(status, LanePhase.STEPPING)

    def _has_ended(self, first: int, worker: WorkerProcess) -> Iterator[Any]:
        """Take what a process said before it ended. Where it has forked others, its sockets may never be closed."""
        for link in self._links_of(first):
            while self._workers[first] is worker and (frames := link.receive()):
                yield from self._all_answered(link, frames)
        if self._workers[first] is worker:
            yield from self._process_lost(first)

    # Losses

    def _failed(self, link: LaneLink, failure: Mapping[str, Any]) -> Iterator[Any]:
        self.supervisor.lost_steps += link.fail(failure)
        # Environments that have been made before may well be made again: that they can't be now is a loss.
        if link.status.phase is not LanePhase.MAKING:
            if failure["is_refusal"]:
                raise refusal(failure, link)
            link.status.raised = raised_in_worker(failure)
            for each in self.links:
                each.status.has_stepped |= each.has_stepped
            self.supervisor.check_first_errors()
        yield from self._lane_lost(link, f"{failure['type']}: {failure['text']}", failure["traceback"])

    def _process_lost(self, first: int, reasons: Mapping[int, str] | None = None) -> Iterator[Any]:
        """Give up a process, for reasons by lane, or because it has ended."""
        worker, self._workers[first] = self._workers[first], None
        if worker is None:
            return
        for link in self._links_of(first):
            link.disconnect(self._selector)
        if worker.fileno() >= 0:
            self._selector.unregister(worker)
        ended = "" if reasons else f"process {worker.pid} {worker.ended()}"
        worker.kill()
        for link in self._links_of(first):
            if link.status.phase not in (LanePhase.LOST, LanePhase.ASIDE):
                yield from self._lane_lost(link, reasons[link.index] if reasons else ended)

    def _late(self, link: LaneLink, text: str) -> dict[int, str]:
        """Why the process of a lane that is late is given up, for every lane in it."""
        link = _at_work(link, self._others)
        first, reason = self._first_of[link.index], link.late_with(text)
        lanes = [each.index for each in self._links_of(first) if each.status.phase is not LanePhase.ASIDE]
        worker = self._workers[first]
        if len(lanes) > 1 and worker is not None:
            shared = ", ".join(map(str, lanes))
            reason = f"{reason}; lanes {shared} share worker process {worker.pid}, which is killed"
        return {lane: reason if lane == link.index else f"lane {link.index} gave {reason}" for lane in lanes}

    def _lane_lost(self, link: LaneLink, reason: str, traceback: str = "") -> Iterator[Any]:
        status, was = link.status, link.status.phase
        status.note(reason)
        if traceback in self._logged:
            traceback = ""
        elif traceback:
            self._logged.append(traceback)
            traceback = f"\n{traceback}"
        self.supervisor.fail(status)
        self.listener.lane_lost(link.index)
        if self.supervisor.is_draining:
            logger.warning("lane %d is lost while the rollout is drained: %s%s", link.index, reason, traceback)
        elif status.phase is LanePhase.ASIDE:
            logger.error("%s", self.supervisor.set_aside_texts[-1])
        else:
            again = max(0.0, status.due - backoff.times.clock())
            logger.warning("lane %d is lost and made again in %.1f s: %s%s", link.index, again, reason, traceback)
        self.supervisor.lost_steps += link.lose(reason, was)
        if not status.is_waited:
            return
        if status.phase is LanePhase.ASIDE or self.supervisor.is_draining:
            yield from self._set_aside(link)

    def _set_aside(self, link: LaneLink) -> Iterator[Any]:
        link.lane.is_set_aside = True
        self.supervisor.give_back(link.status)
        yield link.lane
        self.supervisor.check_any_left()

    # Processes

    def _make(self, link: LaneLink) -> None:
        link.make()
        self.supervisor.begin(link.status, LanePhase.MAKING)

    def _links_of(self, first: int) -> list[LaneLink]:
        """The lanes of a process, by the index of the first."""
        return [link for link in self.links if self._first_of[link.index] == first]

    def _start_process(self, first: int) -> None:
        links = [link for link in self._links_of(first) if link.status.phase is not LanePhase.ASIDE]
        worker = self._workers[first] = WorkerProcess(self.program, len(links), preload=self.program)
        if worker.fileno() >= 0:
            handler = partial(WorkerNode._has_ended, first=first, worker=worker)
            self._selector.register(worker, selectors.EVENT_READ, handler)
        for link, sock in zip(links, worker.sockets, strict=True):
            link.connect(sock, self._selector, partial(WorkerNode._heard, index=link.index))
            self._make(link)

    def _first_answer(self, link: LaneLink) -> dict[str, Any]:
        """A worker's description of the environments that it has made. Raises EnvError when it could not."""
        timeout = self.supervisor.limits.reset_timeout
        until = None if timeout is None else backoff.times.clock() + timeout
        while True:
            left = None if until is None else until - backoff.times.clock()
            if left is not None and left <= 0:
                within = f"{timeout:g} s, Timeouts(reset=…), the start of their process included"
                raise EnvError(f"lane {link.index}: the environments were not made within {within}").see("timeout")
            worker = self._workers[self._first_of[link.index]]
            assert worker is not None
            watched: list[Any] = [link.sock, worker] if worker.fileno() >= 0 else [link.sock]
            if not connection.wait(watched, left):
                continue
            frames = link.receive()
            if frames is None or (not frames and worker.has_ended(0)):
                ended = f"{worker.pid} {worker.ended()}"
                raise EnvError(f"lane {link.index}: process {ended} before it had made the environments").see("worker")
            for answer in frames:
                description: dict[str, Any] = unpack(answer.payload)
                if answer.kind is FrameKind.FAILED:
                    raise refusal(description, link)
                link.status.phase = LanePhase.MADE
                return description


def _at_work(link: LaneLink, others: Sequence[Sequence[LaneLink]]) -> LaneLink:
    """The lane that a lane's worker is at, where that is another one, else the lane itself."""
    mates = others[link.index]
    return next((each for each in mates if each.is_at_work), link) if mates and not link.is_at_work else link


def _progress_of(links: Sequence[LaneLink], others: Sequence[Sequence[LaneLink]], lane: int) -> ProgressMark:
    """A lane's progress; while its worker is at another lane that of the other: the time of its own is yet to begin."""
    link = links[lane]
    if not others[lane]:
        return link.progress
    link = _at_work(link, others)
    turns, activity = link.progress
    return turns * len(links) + link.index, activity  # which says as well whose it is


def _stack_of(worker: WorkerProcess | None, thread: int) -> tuple[StackFrame, ...]:
    """The stack of a worker's thread, by its native id; empty where it can't say."""
    if worker is None or not thread or worker.is_stopped:
        return ()
    return worker.stack_of(thread)


def _end(workers: dict[int, WorkerProcess | None], selector: selectors.BaseSelector) -> None:
    end_all([worker for worker in workers.values() if worker is not None], frame(FrameKind.CLOSE))
    selector.close()
