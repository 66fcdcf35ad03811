"""The base of nodes whose lanes step elsewhere: in worker processes, or on hosts."""

from collections.abc import Iterator, Sequence
from time import perf_counter_ns
from typing import Any, TypeVar

from rollflow.nodes.env.lane_source import LaneSource
from rollflow.nodes.env.workers.lane_supervisor import LaneSupervisor
from rollflow.stream.net import backoff
from rollflow.stream.observe.waits import LastError

L = TypeVar("L", bound=Any)  # a lane, or a token of one, as it goes round


class SupervisedSource(LaneSource):
    """A node whose lanes step elsewhere: what the engine sees of it, and the counts of its supervisor.

    The node's other base says what there is to step, and the node itself what it is called with: the engine reads its
    ports from that.

    supervisor    state of the lanes
    """

    supervisor: LaneSupervisor

    def completed(self) -> Iterator[Any]:
        """The lanes that have come back, or begin anew. Raises EnvError when none is left."""
        began_at, calls = self.supervisor.deadlines.began, self.call_times
        for lane in self._completed():
            began = began_at.get(lane.index)
            if began is not None and not lane.is_set_aside:
                spent = int((backoff.times.clock() - began) * 1e9)
                calls.add(spent)
                if self.trace is not None:
                    does = "reset" if lane.vector_steps == 0 else self.does
                    self.trace.stepped(lane.index, perf_counter_ns() - spent, does)
            yield lane

    def _completed(self) -> Iterator[Any]:
        """The same, uncounted."""
        raise NotImplementedError

    @property
    def patience(self) -> float | None:
        """Seconds until a lane is late or begins anew."""
        return self.supervisor.patience

    @property
    def last_error(self) -> LastError | None:
        """Why a lane was lost, or late, last; None: none ever was. From any thread."""
        return self.supervisor.last_error

    @property
    def report_notes(self) -> Sequence[str]:
        """Sentences about lanes that were set aside, and why. From any thread."""
        return tuple(self.supervisor.set_aside_texts)

    @property
    def in_flight(self) -> int:
        """Lanes that are waited for, and whatever else is."""
        return self.supervisor.in_flight

    @property
    def lost_steps(self) -> int:
        """Transitions that were under way when their environments were lost."""
        return self.supervisor.lost_steps

    @property
    def is_draining(self) -> bool:
        """True once no more steps are asked for."""
        return self.supervisor.is_draining
