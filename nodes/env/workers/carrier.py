"""Nodes whose lanes a carrier takes to where their environments are, and back."""

from collections.abc import Iterator, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from rollflow.nodes.env.lane_source import LaneSource
from rollflow.nodes.env.workers.lane_supervisor import LaneSupervisor
from rollflow.stream.observe.waits import LastError, Wait

if TYPE_CHECKING:
    from rollflow.nodes.env.remote.host_carrier import HostCarrier
    from rollflow.nodes.env.workers.worker_carrier import WorkerCarrier


L = TypeVar("L", bound=Any)  # a lane, or a token of one, as it goes round


class Carried(LaneSource):
    """A node's part in what a carrier does: the background node that the engine sees, and the counts of its supervisor.

    The node's other base says what there is to step, and the node itself what it is called with: the engine reads its
    ports from that.
    """

    carrier: "WorkerCarrier | HostCarrier"

    def start(self) -> Iterator[Any]:
        """Have every lane set out, all at a time. Raises RunError a second time."""
        self._begin()
        return self.carrier.start()

    def completed(self) -> Iterator[Any]:
        """The lanes that have come back, or begin anew. Raises EnvError when none is left."""
        began_at, calls = self._supervisor.deadlines.began, self.call_times
        for lane in self.carrier.completed():
            began = began_at.get(lane.index)
            if began is not None and not lane.is_set_aside:
                calls.add(int((monotonic() - began) * 1e9))
                if self.trace is not None:
                    self.trace.stepped(lane.index, int(began * 1e9), "reset" if lane.vector_steps == 0 else self.does)
            yield lane

    def fileno(self) -> int:
        """A descriptor that can be read once something has come."""
        return self.carrier.fileno()

    def hasten(self) -> None:
        """Have lanes come back soon, also without a step: no more steps are asked for."""
        self.carrier.hasten()

    def describe(self) -> str:
        """Lanes, slots and where they are, for `explain()`."""
        return f"{super().describe()}, {self.carrier.describe()}"

    def at_work(self, name: str) -> Iterator[Wait]:
        """What every lane that is waited for is at, where it is."""
        return iter(self.carrier.at_work(name))

    @property
    def lanes_at_work(self) -> set[int]:
        """Numbers of the lanes that make steps, or should: none that has left, is late or is lost. From any thread."""
        return self.carrier.lanes_at_work

    def close(self) -> None:
        """End all that was begun elsewhere, and release the memory of all lanes."""
        self.is_closed = True
        try:
            self.carrier.close()
        finally:
            self._release()

    @property
    def patience(self) -> float | None:
        """Seconds until a lane is late or begins anew."""
        return self.carrier.patience

    @property
    def last_error(self) -> LastError | None:
        """Why a lane was lost, or late, last; None: none ever was. From any thread."""
        return self._supervisor.last_error

    @property
    def report_notes(self) -> Sequence[str]:
        """Sentences about lanes that were set aside, and why. From any thread."""
        return tuple(self._supervisor.set_aside_texts)

    @property
    def in_flight(self) -> int:
        """Lanes that are waited for, and whatever else is."""
        return self._supervisor.in_flight

    @property
    def lost_steps(self) -> int:
        """Transitions that were under way when their environments were lost."""
        return self._supervisor.lost_steps

    @property
    def is_draining(self) -> bool:
        """True once no more steps are asked for."""
        return self._supervisor.is_draining

    @property
    def _supervisor(self) -> LaneSupervisor:
        return self.carrier.supervisor
