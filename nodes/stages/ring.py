"""The four stages of a rollout, joined to a ring, and the node that gathers ready lanes into one forward pass."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from rollflow.nodes.env.lane_source import LaneSource
from rollflow.stream.graph.graph import Graph
from rollflow.stream.graph.meter import CallTimes, NodeMeter, clock
from rollflow.stream.graph.node import Gate

L = TypeVar("L", bound=Any)
JOINTLY = 1 << 20  # and the number of lanes: what a pass over several is noted as


class JointForward(Generic[L]):
    """A background node that runs the module over all lanes that are ready at a time, in one pass.

        forward      a pass over several lanes: has `rows(lane)`, those of a lane in it, and `forward_lanes(lanes)`
        max_batch    slots in one pass, at most
        max_wait     seconds to wait for further lanes once one is ready

    call_times    of passes
    note          told of each pass: JOINTLY and the count of lanes, and ~ the number of each; None: nobody is
    """

    note: Callable[[int], None] | None = None

    def __init__(self, forward: Any, *, max_batch: int, max_wait: float = 0.0) -> None:
        self.call_times = CallTimes()
        self._forward, self._max_batch, self._max_wait = forward, max_batch, max_wait
        self._ready: deque[L] = deque()
        self._meter = NodeMeter("module")
        self._gathers_since = 0  # time in ns since which `_ready` gathers
        self._is_hastened = False

    def __call__(self, batches: L) -> L | None:
        """Take a lane for the next pass."""
        if self._max_wait and not self._ready:
            self._gathers_since = clock()
        self._ready.append(batches)
        return None

    @property
    def in_flight(self) -> int:
        """Lanes that wait for a pass."""
        return len(self._ready)

    @property
    def patience(self) -> float | None:
        """Seconds for which to wait for further lanes; None: none is ready."""
        if not self._ready:
            return None
        return max(self._max_wait - (clock() - self._gathers_since) / 1e9, 0.0)

    def fileno(self) -> int:
        """-1: passes are done by `completed`."""
        return -1

    def completed(self) -> Iterator[L]:
        """The lanes after one pass over them; none if it waits for further ones."""
        lanes = self._due()
        if lanes:
            began = clock()
            if self.note is not None:
                for event in (JOINTLY + len(lanes), *(~lane.index for lane in lanes)):
                    self.note(event)
            self._meter.begin_work(began)
            try:
                self._forward.forward_lanes(lanes)
                self.call_times.add(clock() - began)
            finally:
                self._meter.end_work(clock())
            for _ in lanes:
                self._ready.popleft()
            self._gathers_since = clock()
            yield from lanes

    def take_meter(self, meter: NodeMeter) -> None:
        """Count passes by this meter; a wait for further lanes is none of its work."""
        self._meter = meter

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

    def describe(self) -> str:
        """The bounds of a pass, for `explain()`."""
        waits = f", waits {self._max_wait * 1e3:g} ms" if self._max_wait else ""
        return f"up to {self._max_batch} slots a pass{waits}"


def joint_forward(forward: Any, largest: int, how: Any) -> Any:
    """The node that does passes over several lanes; `forward` itself if every lane has passes of its own.

        largest    slots of the largest lane
        how        passes are done: a `Forward`

    Raises ValueError if a lane does not fit into a pass.
    """
    if how.max_batch is None:
        return forward
    if how.max_batch < largest:
        raise ValueError(f"max_batch is {how.max_batch}, expected at least {largest}: a lane's slots go together")
    return JointForward(forward, max_batch=how.max_batch, max_wait=how.max_wait)


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
