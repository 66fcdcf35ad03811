"""RolloutDoctor: the doctor of a rollout, with its reader and the learner pipeline in the reader's thread."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from threading import get_ident
from typing import Any
from weakref import WeakMethod

from rollflow.nodes.rollout.drivers import Driver
from rollflow.stream.data.errors import StallError
from rollflow.stream.graph.meter import CallTimes, NodeMeter, clock
from rollflow.stream.graph.run_doctor import Doctor
from rollflow.stream.observe.stacks import stack_of_thread
from rollflow.stream.observe.trace import FragmentName
from rollflow.stream.observe.waits import CALLER, Exit, Look, Sign, Wait

_KEPT = 101  # times of the reader, of which the median is told


class RolloutDoctor(Doctor):
    """Watches a rollout's ring, its learner pipeline and its reader.

    drive       runs the ring
    learner     meter of the learner pipeline
    signs       method that gives silent faults; held weakly

    reader_times    how long the reader had each round, without the time of the learner pipeline
    """

    def __init__(
        self, drive: Driver, learner: NodeMeter, signs: Callable[[], Sequence[Sign]], *of_every_doctor: Any
    ) -> None:
        drive.run.counters.learner = self._learner = learner
        super().__init__(drive.run.counters, *of_every_doctor)
        self._drive, self._signs = drive, WeakMethod(signs)
        self.reader_times = CallTimes()
        self._works_since = 0  # time in ns when it got the last of them; 0: it has none
        self._learnt = 0  # busy time of the learner then
        self._reader = get_ident()  # its thread
        self._held: tuple[int, int, list[FragmentName]] | None = None  # given, busy time of the learner then, what

    def stop(self) -> None:
        self._trace_update()
        super().stop()

    def reader_asks(self) -> None:
        """Take note that the reader asks for the next round, in its thread."""
        if self._works_since:
            self.reader_times.add(clock() - self._works_since - (self._learner.busy_ns - self._learnt))
        self._reader, self._works_since = get_ident(), 0
        self._trace_update()

    def reader_gets(self, fragments: Iterable[Any]) -> None:
        """Take note that the reader gets a round of these fragments."""
        self._works_since, self._learnt = clock(), self._learner.busy_ns
        if self._tracing.fragments is not None:
            names = [(fragment.lane, fragment.sequence) for fragment in fragments]
            self._held = self._works_since, self._learnt, names

    def look(self) -> Look | None:
        """The look of the driver, with the learner pipeline before the reader; None: it does not run."""
        look = self._drive.look()
        if look is None or self.is_over:
            return None
        waits, exits, since = dict(look.waits), look.exits, self._learner.works_since
        stack = partial(stack_of_thread, self._reader)
        if since is None:
            got, reader = self._works_since, waits[CALLER]
            age_s = (clock() - got) / 1e9 if got and reader.kind == "works" else 0.0
            waits[CALLER] = replace(reader, age_s=age_s, stack=stack)
        else:
            learner = Wait(
                self._learner.name,
                "call",
                "makes a batch",
                mark=since,
                age_s=(clock() - since) / 1e9,
                calls=self._learner.items,
                remedy="look at the learner connectors: rollout.learner_pipeline.timers() has the time of each piece",
                stack=stack,
            )
            reader = replace(waits[CALLER], kind="waits", doing="waits", on=(learner.name,), mark=since)
            waits |= {CALLER: reader, learner.name: learner}
            exits = tuple(Exit(CALLER, each.items, waits=True) if each.party == CALLER else each for each in exits)
        times = tuple(took / 1e9 for took in list(self.reader_times.recent)[-_KEPT:])
        return Look(exits, waits, "fragment", times)

    def signs(self) -> Sequence[Sign]:
        signs = self._signs()
        return () if signs is None else signs()

    def end_stalled(self, error: StallError) -> None:
        self._drive.end_stalled(error)

    def _trace_update(self) -> None:
        """Record what the reader did with its last round, once the learner pipeline had made a batch of it."""
        held, self._held, trace = self._held, None, self._tracing.fragments
        if held is not None and trace is not None:
            given, learner_ns, fragments = held
            trace.update(fragments, given + self._learner.busy_ns - learner_ns, clock())
