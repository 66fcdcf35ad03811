"""Lanes that worker processes do something for: how they are started, asked, awaited, lost and made again."""

import abc
import logging
import selectors
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Any

import cloudpickle

from rollflow.nodes.env_source import sizes_of
from rollflow.nodes.workers.frames import Frame, Kind, frame
from rollflow.nodes.workers.lane_link import LaneLink, State
from rollflow.nodes.workers.watch import At, Watch
from rollflow.nodes.workers.worker_process import WorkerProcess, core_count, end_all
from rollflow.stream import errors
from rollflow.stream.errors import EnvError, RunError
from rollflow.stream.packing import unpack
from rollflow.stream.seeding import seed_for

logger = logging.getLogger(__name__)


class LaneProcesses(abc.ABC):
    """Has worker processes step the environments of lanes, while others are worked on.

        workers                        processes; several lanes in one have a thread each. None: one for each core, but
                                       no more than lanes
        step_timeout, reset_timeout    seconds after which a worker is taken for hung and killed; None: never. Every
                                       reset has a time of its own: see `Watch`
        max_failures                   how often in a row a lane may be lost; then it is set aside

        in_flight     lanes that are waited for
        lost_steps    transitions that were under way in workers that were lost

    A lane is lost when its process ends, hangs, or its environment raises. What is open ends then as truncated, and the
    lane is made again after a while, longer each time. A lane that is set aside gives the fragment that it has begun,
    and no more. Only where no lane is left does the run end, with an EnvError that says why each was lost.

    One of several bases of a node, which has `seed`, `lanes`, and what workers are asked to do.
    """

    program: str
    link_class: type[LaneLink] = LaneLink
    seed: int
    lanes: Any
    lost_steps: int
    lane_lost: Callable[[int], None]
    is_closed: bool

    def __init__(
        self, *, workers: int | None, step_timeout: float | None, reset_timeout: float | None, max_failures: int
    ) -> None:
        self.in_flight = 0
        self._asked_workers = workers
        self._reset_timeout = reset_timeout
        self._links: list[LaneLink] = []
        self._watch = Watch(step_timeout, reset_timeout, partial(_at, self._links))
        self._max_failures = max_failures
        self._workers: dict[int, WorkerProcess | None] = {}  # by the index of their first lane
        self._first_of: list[int] = []  # of every lane: the first lane of its worker
        self._came_aside: deque[LaneLink] = deque()
        self.is_draining = False
        self._selector = selectors.DefaultSelector()  # with what of this class to call; not with this node itself
        self._ending = weakref.finalize(self, _end, self._workers, self._selector)

    def hasten(self) -> None:
        """Have those lanes come back at once that have no environments to step; from now on none is made again."""
        self.is_draining = True
        for link in self._links:
            if link.is_waited and self._has_no_step(link):
                link.state = State.ASIDE
                self._came_aside.append(link)

    def fileno(self) -> int:
        """Can be read once a worker has something to say."""
        return self._selector.fileno()

    @property
    def patience(self) -> float | None:
        """Seconds until a worker is late, or is to be started again."""
        due = [link.due for link in self._links if link.state is State.LOST]
        times = [self._watch.left, max(0.0, min(due) - monotonic()) if due else None]
        return min((time for time in times if time is not None), default=None)

    def completed(self) -> Iterator[Any]:
        """The lanes that have been stepped, or begin anew. Raises EnvError when the last one has been set aside."""
        while self._came_aside:
            yield from self._set_aside(self._came_aside.popleft())
        for key, events in self._selector.select(0):
            yield from key.data(self, events=events)
        for index, told in self._watch.overdue().items():
            yield from self._process_lost(self._first_of[index], f"lane {index} gave {told}")
        now = monotonic()
        for link in self._links:
            if link.state is State.LOST and link.due <= now and not self.is_draining:
                self._make_again(link)

    # What nodes have to do with lanes

    def _start_lanes(self) -> None:
        """Have the environments of every lane reset, all at a time; the lanes come by `completed`."""
        for link, lane in zip(self._links, self.lanes, strict=True):
            link.lane = lane
            self._await(link)
            self._go_on(link)

    def _hand_over(self, lane: Any) -> None:
        """Have a lane's worker step its environments with the actions that it brings."""
        link = self._links[lane.index]
        self._await(link)
        if link.state is State.READY:
            link.step()
            return
        # The worker was lost while the lane was somewhere else: no step is under way.
        self.lost_steps += self._lose(lane, link.reason, is_under_way=False)
        if link.state is State.ASIDE or self.is_draining:
            self._came_aside.append(link)
        else:
            self._go_on(link)

    def _launch(self, makers: Sequence[Any]) -> list[dict[str, Any]]:
        """Have processes make the environments of every lane; what they say of them."""
        self._links += [self.link_class(index, _pickled(maker, index)) for index, maker in enumerate(makers)]
        count = min(self._asked_workers or core_count(), len(makers))
        for size in sizes_of(len(makers), count):
            self._first_of += [len(self._first_of)] * size
        for first in sorted(set(self._first_of)):
            self._start_process(first)
        return [self._first_answer(link) for link in self._links]

    def _end_processes(self) -> None:
        """End the worker processes."""
        self.is_closed = True
        for link in self._links:
            link.disconnect(self._selector)
        self._ending()

    # What they may do otherwise

    @abc.abstractmethod
    def first_slots(self) -> list[int]:
        """The number of every lane's first environment."""

    def _lose(self, lane: Any, reason: str, *, is_under_way: bool) -> int:
        """End what is open in a lane: how many transitions are lost, those of a step that is under way among them."""
        lost: int = lane.lose(reason)
        return lost if is_under_way else 0

    def _lane_of(self, link: LaneLink) -> Any:
        """What goes round for a lane."""
        return link.lane

    def _lost_with(self, link: LaneLink, reason: str, was: State) -> int:
        """How many transitions were lost with a lane's worker, and what it was at."""
        if was is not State.STEPPING:
            return 0
        assert link.lane is not None
        return self._lose(link.lane, reason, is_under_way=True)

    def _has_no_step(self, link: LaneLink) -> bool:
        """Whether a lane that is waited for would have to be made or reset before it could come back with a step."""
        return link.state in (State.LOST, State.MAKING, State.MADE, State.RESETTING)

    # Answers

    def _heard(self, link: LaneLink, events: int) -> Iterator[Any]:
        if events & selectors.EVENT_WRITE:
            link.send_kept()
        if not events & selectors.EVENT_READ:
            return
        frames = link.receive()
        if frames is None:
            yield from self._process_lost(self._first_of[link.index])
        else:
            yield from self._all_answered(link, frames)

    def _all_answered(self, link: LaneLink, frames: Sequence[Frame]) -> Iterator[Any]:
        for answer in frames:
            if link.state is State.ASIDE:
                answer.discard()
            else:
                yield from self._answered(link, answer)

    def _answered(self, link: LaneLink, answer: Frame) -> Iterator[Any]:
        if answer.kind is Kind.FAILED:
            yield from self._failed(link, unpack(answer.payload))
        elif answer.kind is Kind.READY:
            link.state = State.MADE
            if link.is_waited:
                self._go_on(link)
        else:
            link.take(answer)
            yield self._come_back(link)

    def _has_ended(self, first: int, worker: WorkerProcess, events: int) -> Iterator[Any]:
        """Take what a process said before it ended. Where it has forked others, its sockets may never be closed."""
        for link in self._links_of(first):
            while self._workers[first] is worker and (frames := link.receive()):
                yield from self._all_answered(link, frames)
        if self._workers[first] is worker:
            yield from self._process_lost(first)

    # Losses

    def _failed(self, link: LaneLink, told: Mapping[str, Any]) -> Iterator[Any]:
        # Environments that have been made before may well be made again: that they can't be now is a loss.
        if told["is_refusal"] and link.state is not State.MAKING:
            raise refusal(told, link)
        yield from self._lane_lost(link, f"{told['type']}: {told['text']}", told["traceback"])

    def _process_lost(self, first: int, reason: str = "") -> Iterator[Any]:
        """Give up a process, for a reason or because it has ended."""
        worker, self._workers[first] = self._workers[first], None
        if worker is None:
            return
        for link in self._links_of(first):
            link.disconnect(self._selector)
        if worker.fileno() >= 0:
            self._selector.unregister(worker)
        reason = reason or f"process {worker.pid} {worker.ended()}"
        worker.kill()
        for link in self._links_of(first):
            if link.state not in (State.LOST, State.ASIDE):
                yield from self._lane_lost(link, reason)

    def _lane_lost(self, link: LaneLink, reason: str, told: str = "") -> Iterator[Any]:
        was = link.state
        link.fail(reason, 0 if self.is_draining else self._max_failures)
        self.lane_lost(link.index)
        if self.is_draining:
            logger.warning("lane %d is lost while the rollout is drained: %s\n%s", link.index, reason, told)
        elif link.state is State.ASIDE:
            logger.error("lane %d is set aside, lost %d times in a row: %s", link.index, link.failures, reason)
        else:
            again = max(0.0, link.due - monotonic())
            logger.warning("lane %d is lost and made again in %.1f s: %s\n%s", link.index, again, reason, told)
        if not link.is_waited:
            return
        self._watch.end(link.index)
        self.lost_steps += self._lost_with(link, reason, was)
        if link.state is State.ASIDE:
            yield from self._set_aside(link)

    def _set_aside(self, link: LaneLink) -> Iterator[Any]:
        self._lane_of(link).is_set_aside = True
        yield self._come_back(link)
        if not self.is_draining and all(each.state is State.ASIDE for each in self._links):
            reasons = "; ".join(f"lane {each.index}: {each.reason}" for each in self._links)
            raise EnvError(f"every lane was lost {self._max_failures + 1} times in a row, the last time by: {reasons}")

    def _make_again(self, link: LaneLink) -> None:
        first = self._first_of[link.index]
        if self._workers[first] is None:
            self._start_process(first)
        else:
            self._make(link)

    def _make(self, link: LaneLink) -> None:
        link.make()
        if link.is_waited:
            self._watch.begin(link.index)

    # Inside

    def _await(self, link: LaneLink) -> None:
        self.in_flight += 1
        link.is_waited = True
        self._watch.begin(link.index)

    def _come_back(self, link: LaneLink) -> Any:
        self.in_flight -= 1
        link.is_waited = False
        self._watch.end(link.index)
        return self._lane_of(link)

    def _go_on(self, link: LaneLink) -> None:
        """Have the environments of a lane that is waited for reset, if they are made."""
        if link.state is State.MADE:
            # Another start goes on with other episodes than the first: the same might fail in the same way.
            seed = self.seed if not link.starts else seed_for(self.seed, "restart", link.starts)
            link.reset(seed, self.first_slots()[link.index])

    def _links_of(self, first: int) -> list[LaneLink]:
        """The lanes of a process, by the index of the first."""
        return [link for link in self._links if self._first_of[link.index] == first]

    def _start_process(self, first: int) -> None:
        links = [link for link in self._links_of(first) if link.state is not State.ASIDE]
        worker = self._workers[first] = WorkerProcess(self.program, len(links))
        if worker.fileno() >= 0:
            told = partial(LaneProcesses._has_ended, first=first, worker=worker)
            self._selector.register(worker, selectors.EVENT_READ, told)
        for link, sock in zip(links, worker.sockets, strict=True):
            link.connect(sock, self._selector, partial(LaneProcesses._heard, link=link))
            self._make(link)

    def _first_answer(self, link: LaneLink) -> dict[str, Any]:
        """What a lane's worker says of the environments that it has made. Raises EnvError when it could not."""
        until = None if self._reset_timeout is None else monotonic() + self._reset_timeout
        while True:
            left = None if until is None else until - monotonic()
            if left is not None and left <= 0:
                within = f"reset_timeout={self._reset_timeout:g} s, the start of their process included"
                raise EnvError(f"lane {link.index}: the environments were not made within {within}")
            worker = self._workers[self._first_of[link.index]]
            assert worker is not None
            if not _can_be_read(link, worker, left):
                continue
            frames = link.receive()
            if frames is None or (not frames and worker.has_ended(0)):
                ended = f"{worker.pid} {worker.ended()}"
                raise EnvError(f"lane {link.index}: process {ended} before it had made the environments")
            for answer in frames:
                told: dict[str, Any] = unpack(answer.payload)
                if answer.kind is Kind.FAILED:
                    raise refusal(told, link)
                link.state = State.MADE
                return told


def _at(links: Sequence[LaneLink], lane: int) -> At:
    return links[lane].at


def _end(workers: dict[int, WorkerProcess | None], selector: selectors.BaseSelector) -> None:
    alive = [worker for worker in workers.values() if worker is not None]
    end_all(alive, frame(Kind.CLOSE))
    selector.close()


def _can_be_read(link: LaneLink, worker: WorkerProcess, timeout: float | None) -> bool:
    assert link.sock is not None
    with selectors.DefaultSelector() as selector:
        selector.register(link.sock, selectors.EVENT_READ)
        if worker.fileno() >= 0:
            selector.register(worker, selectors.EVENT_READ)
        return bool(selector.select(timeout))


def _pickled(maker: Any, index: int) -> bytes:
    try:
        pickled: bytes = cloudpickle.dumps(maker)
    except Exception as error:
        raise EnvError(
            f"the environments of lane {index} can't be handed to a worker process: {error}; expected an id, or "
            "callables that hold nothing that can't be pickled"
        ) from error
    return pickled


def refusal(told: Mapping[str, Any], link: LaneLink) -> Exception:
    """The error that a worker's answer tells of: one of ours as it is, another as an EnvError or a RunError."""
    kind = getattr(errors, told["type"], None)
    text = told["text"]
    if kind is None:
        kind, text = EnvError if link.state is State.MAKING else RunError, f"{told['type']}: {text}"
    error: Exception = kind(text)
    for note in [*told["notes"], f"lane {link.index}, in a worker process:\n{told['traceback']}"]:
        error.add_note(note)
    return error
