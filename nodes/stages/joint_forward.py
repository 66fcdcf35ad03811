"""A node that gathers ready lanes into one forward pass."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from rollflow.stream.graph.meter import CallTimes, clock

L = TypeVar("L")
L_contra = TypeVar("L_contra", contravariant=True)


class LanesForward(Protocol[L_contra]):
    """Forward passes over several lanes together, with one agent in each environment or several."""

    def rows(self, lane: L_contra) -> int:
        """Rows of a lane in a pass."""
        ...

    def forward_lanes(self, lanes: Sequence[L_contra]) -> None:
        """Do the pass; each lane gets its rows of the output."""
        ...


class JointForward(Generic[L]):
    """A background node that runs the module over all lanes that are ready at a time, in one pass.

        forward      the pass
        max_batch    slots in one pass, at most
        max_wait     seconds to wait for further lanes once one is ready

    call_times    of passes
    """

    def __init__(self, forward: LanesForward[L], *, max_batch: int, max_wait: float = 0.0) -> None:
        self.call_times = CallTimes()
        self._forward, self._max_batch, self._max_wait = forward, max_batch, max_wait
        self._ready: deque[L] = deque()
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
        """Seconds for which to wait for further lanes; None: there are none for the next pass."""
        if not self._ready:
            return None
        return max(self._max_wait - (clock() - self._gathers_since) / 1e9, 0.0)

    def fileno(self) -> int:
        """-1: there is nothing to wait for but further lanes."""
        return -1

    def completed(self) -> Iterator[L]:
        """The lanes after one pass over them. A pass begins once the outputs of the one before are recorded.

        It loads weights that were published meanwhile, which may lie where those outputs lie.
        """
        if not (lanes := self._due()):
            return
        began = clock()
        self._forward.forward_lanes(lanes)
        self._gathers_since = clock()
        self.call_times.add(self._gathers_since - began)
        for _ in lanes:
            self._ready.popleft()
        yield from lanes

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


def joint_forward(forward: LanesForward[L], largest: int, how: Any) -> LanesForward[L] | JointForward[L]:
    """The node that does passes over several lanes; `forward` itself where every lane has passes of its own.

        largest    slots of the largest lane
        how        passes are done: a `Forward`

    Raises ValueError where a lane does not fit into a pass.
    """
    if how.max_batch is None:
        return forward
    if how.max_batch < largest:
        raise ValueError(f"max_batch is {how.max_batch}, expected at least {largest}: a lane's slots go together")
    return JointForward(forward, max_batch=how.max_batch, max_wait=how.max_wait)
