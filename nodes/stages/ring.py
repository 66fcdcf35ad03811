"""The four stages of a rollout, joined to a ring, and the node that gathers ready lanes into one forward pass."""

import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from rollflow.nodes.env.lane_source import LaneSource
from rollflow.nodes.env.workers.job_thread import JobThread
from rollflow.stream.graph.graph import Graph
from rollflow.stream.graph.meter import CallTimes, NodeMeter, clock
from rollflow.stream.graph.node import Gate
from rollflow.stream.graph.wakeup import Wakeup
from rollflow.stream.net import backoff
from rollflow.stream.observe.stacks import stack_of_thread
from rollflow.stream.observe.waits import Wait

L = TypeVar("L")

logger = logging.getLogger(__name__)


class JointForward(Generic[L]):
    """A background node that runs the module over all lanes that are ready at a time, in one pass.

        forward      a pass over several lanes: has `rows(lane)`, those of a lane in it, and `forward_lanes(lanes)`
        max_batch    slots in one pass, at most
        max_wait     seconds to wait for further lanes once one is ready
        in_thread    run passes in a thread, so that other lanes' environments step meanwhile

    call_times    of passes
    """

    def __init__(self, forward: Any, *, max_batch: int, max_wait: float = 0.0, in_thread: bool = False) -> None:
        self.call_times = CallTimes()
        self._forward, self._max_batch, self._max_wait = forward, max_batch, max_wait
        self._ready: deque[L] = deque()
        self._meter = NodeMeter("module")
        self._gathers_since = 0  # time in ns since which `_ready` gathers
        self._is_hastened = False
        self._under_way: Sequence[L] = ()  # lanes of a pass in the thread that was begun, and not completed
        self._begun: tuple[int, int] | None = None  # when that began, in ns, and its thread; None: it does not run
        self._is_done = False  # True once it has ended
        self._errors: list[BaseException] = []  # what it has raised
        self._thread = JobThread("rollflow forward") if in_thread else None
        self._bell = Wakeup() if in_thread else None  # rung when a pass is done

    def __call__(self, batches: L) -> L | None:
        """Take a lane for the next pass."""
        if self._max_wait and not self._ready:
            self._gathers_since = clock()
        self._ready.append(batches)
        return None

    @property
    def in_flight(self) -> int:
        """Lanes that wait for a pass, or are in one."""
        return len(self._ready) + len(self._under_way)

    @property
    def patience(self) -> float | None:
        """Seconds for which to wait for further lanes; None: the next pass waits for the one under way, or for none."""
        if not self._ready or self._under_way:
            return None
        return max(self._max_wait - (clock() - self._gathers_since) / 1e9, 0.0)

    def fileno(self) -> int:
        """A descriptor that is readable once a pass in the thread is done; -1: there is nothing to wait for."""
        return -1 if self._bell is None else self._bell.fileno()

    def completed(self) -> Iterator[L]:
        """The lanes after one pass over them. A pass begins once the outputs of the one before are recorded.

        It loads weights that were published meanwhile, which may lie where those outputs lie.
        """
        if self._bell is not None:
            self._bell.silence()
            if self._is_done:
                self._meter.end_work(clock())
                self._is_done = False
                if self._errors:
                    raise self._errors.pop()  # not held by this frame, to which its traceback refers
                lanes, self._under_way = self._under_way, ()
                yield from lanes
        elif lanes := self._due():
            self._meter.begin_work(clock())
            try:
                self._pass(lanes)
            finally:
                self._meter.end_work(clock())
            self._take(lanes)
            yield from lanes

    def take_meter(self, meter: NodeMeter) -> None:
        """Count passes by this meter; a wait for further lanes is none of its work."""
        self._meter = meter

    def go_on(self) -> None:
        """Begin the next pass in the thread, if it has none."""
        if self._thread is not None and not self._under_way and (lanes := self._due()):
            self._meter.begin_work(clock())
            self._under_way = lanes
            self._thread.put(partial(self._work, lanes))
            self._take(lanes)

    def _take(self, lanes: Sequence[L]) -> None:
        for _ in lanes:
            self._ready.popleft()
        self._gathers_since = clock()

    def hasten(self) -> None:
        """Wait for no further lanes from now on."""
        self._is_hastened = True

    def _due(self) -> list[L]:
        """The lanes of the next pass; none if it waits for further ones."""
        lanes: list[L] = []
        slots = 0
        for lane in self._ready:
            slots += self._forward.rows(lane)
            # A lane's slots go together, also if one came later that has more.
            if lanes and slots > self._max_batch:
                break
            lanes.append(lane)
        is_full = slots >= self._max_batch
        is_over = clock() - self._gathers_since >= self._max_wait * 1e9
        return lanes if is_full or is_over or self._is_hastened else []

    def _pass(self, lanes: Sequence[L]) -> None:
        began = clock()
        self._forward.forward_lanes(lanes)
        self.call_times.add(clock() - began)

    def _work(self, lanes: Sequence[L]) -> None:
        """Do a pass in the thread."""
        self._begun = clock(), threading.get_ident()
        try:
            self._pass(lanes)
        except BaseException as error:
            self._errors.append(error)
        self._begun, self._is_done = None, True
        assert self._bell is not None
        self._bell.ring()

    def at_work(self, name: str) -> Iterator[Wait]:
        """The pass under way in the thread."""
        begun = self._begun
        if begun is not None:
            age_s, stack = (clock() - begun[0]) / 1e9, partial(stack_of_thread, begun[1])
            calls = len(self.call_times.recent)
            yield Wait(name, "call", "is in a forward pass", (), begun, age_s, calls, stack=stack)

    def describe(self) -> str:
        """The bounds of a pass and its place, for `explain()`."""
        waits = f", waits {self._max_wait * 1e3:g} ms" if self._max_wait else ""
        return f"up to {self._max_batch} slots a pass{waits}{', in a thread' if self._thread is not None else ''}"

    def close(self) -> None:
        """End the thread, once the pass under way is done; one that hangs is left behind, which is logged."""
        self._meter.end_work(clock())
        if self._thread is None or self._bell is None:
            return
        self._thread.end()
        limit = backoff.times.close_s
        if not self._thread.has_ended(limit):
            logger.warning("the thread of forward passes hangs for %.1f s, and is left behind", limit)
        self._errors, self._under_way = [], ()
        self._bell.close()


def joint_forward(forward: Any, largest: int, how: Any) -> Any:
    """The node that does passes over several lanes; `forward` itself if every lane has passes of its own.

        largest    slots of the largest lane
        how        passes are done: a `Forward`

    Raises ValueError if a lane does not fit into a pass.
    """
    max_batch = how.max_batch
    if not how.joins_lanes:
        return forward
    if max_batch is not None and max_batch < largest:
        raise ValueError(f"max_batch is {max_batch}, expected at least {largest}: a lane's slots go together")
    options = {"max_wait": how.max_wait, "in_thread": how.in_thread}
    return JointForward(forward, max_batch=max_batch or largest, **options)


STAGES = ("env", "env_to_module", "module", "module_to_env")


def ring_of(environments: LaneSource, prepare: Any, forward: Any, act: Any, gate: Gate | None) -> Graph:
    """The ring, with the output `fragments`; the gate lets a lane go on to its next step.

    prepare, forward, act    the stages before the forward pass, of it, and behind it, of one agent or of several
    """
    graph = Graph("rollout")
    graph.add(env=environments, env_to_module=prepare)
    graph.add(module=forward, module_to_env=act)
    graph.output("fragments", "env_to_module.fragments", capacity=environments.most_lanes)
    graph.connect("env", "env_to_module")
    graph.connect("env_to_module.batches", "module", gate=gate)
    graph.connect("module", "module_to_env")
    graph.connect("module_to_env", "env", feedback=True)
    return graph
