"""RolloutDoctor: the stall doctor of a rollout, with its reader and the learner pipeline in the reader's thread."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from threading import get_ident
from typing import Any
from weakref import WeakMethod

from rollflow.nodes.rollout.drivers import Driver
from rollflow.stream.data.errors import RunError, StallError
from rollflow.stream.graph.drawing import run_snapshot
from rollflow.stream.graph.meter import CallTimes, NodeMeter, clock
from rollflow.stream.graph.report import Report
from rollflow.stream.graph.tracing import Traceable, Tracing
from rollflow.stream.observe.diagnosis import Diagnosis
from rollflow.stream.observe.run_socket import RunSocket
from rollflow.stream.observe.stacks import stack_of_thread
from rollflow.stream.observe.trace import FragmentName
from rollflow.stream.observe.waits import CALLER, Exit, Look, Sign, Wait
from rollflow.stream.observe.watch import StallRules, StallThread

_KEPT = 101  # times of the reader, of which the median is told


class RolloutDoctor:
    """Watches a rollout's ring, its learner pipeline and its reader, and shows them to who asks.

    rules       when and how it speaks
    learner     meter of the learner pipeline
    signs       method that gives silent faults; held weakly
    snapshot    method that gives what there is to see of the rollout; held weakly
    trace_to    file for a trace; None: there is one only when it is asked for

    reader_times    how long the reader had each round, without the time of the learner pipeline
    """

    def __init__(
        self,
        rules: StallRules,
        learner: NodeMeter,
        signs: Callable[[], Sequence[Sign]],
        snapshot: Callable[[], dict[str, Any]],
        trace_to: str | PathLike[str] | None = None,
    ) -> None:
        self.rules = rules
        self._learner, self._signs = learner, WeakMethod(signs)
        self._drive: Driver | None = None
        self._watcher = StallThread(self, rules, self._end_stalled)
        self._tracing, self._trace_to = Tracing(self._traceable), trace_to
        self._socket = RunSocket(snapshot, self._tracing.serve)
        self.reader_times = CallTimes()
        self._works_since = 0  # time in ns when it got the last of them; 0: it has none
        self._learnt = 0  # busy time of the learner then
        self._reader = 0  # its thread
        self._held: tuple[int, int, list[FragmentName]] | None = None  # given, busy time of the learner then, what

    def begin(self, drive: Driver) -> None:
        """Watch a driver, from before its start on."""
        self._drive, self._reader = drive, get_ident()
        self._tracing.begin(self._trace_to)
        self._watcher.start()
        self._socket.start()

    def end(self) -> None:
        """Watch no more; again does nothing."""
        self._socket.stop()
        self._watcher.stop()
        self._trace_update()
        self._tracing.end()
        self._drive = None

    def reader_asks(self) -> None:
        """Take note that the reader asks for the next round, in its thread."""
        if self._works_since:
            self.reader_times.add(clock() - self._works_since - (self._learner.busy_ns - self._learnt))
        self._reader, self._works_since = get_ident(), 0
        if self._tracing.fragments is not None:
            self._trace_update()
            self._tracing.follow()  # in a thread of its own, the ring has its meters by now

    def reader_gets(self, fragments: Iterable[Any]) -> None:
        """Take note that the reader gets a round of these fragments."""
        self._works_since, self._learnt = clock(), self._learner.busy_ns
        if self._tracing.fragments is not None:
            names = [(fragment.lane, fragment.sequence) for fragment in fragments]
            self._held = self._works_since, self._learnt, names

    def diagnose(self) -> Diagnosis:
        """What the rollout waits for right now."""
        return self._watcher.diagnose()

    def look(self) -> Look | None:
        """The look of the driver, with the learner pipeline before the reader; None: it does not run."""
        drive = self._drive
        look = None if drive is None else drive.look()
        if look is None:
            return None
        look = replace(
            look, noun="fragment", caller=tuple(took / 1e9 for took in list(self.reader_times.recent)[-_KEPT:])
        )
        since, reader = self._learner.works_since, look.waits[CALLER]
        if since is None:
            got = self._works_since
            age_s = (clock() - got) / 1e9 if got and reader.kind == "works" else 0.0
            reader = replace(reader, age_s=age_s, stack=partial(stack_of_thread, self._reader))
            return replace(look, waits={**look.waits, CALLER: reader})
        learner = Wait(
            self._learner.name,
            "call",
            "makes a batch",
            mark=since,
            age_s=(clock() - since) / 1e9,
            calls=self._learner.items,
            remedy="look at the learner connectors: rollout.learner_pipeline.timers() has the time of each piece",
            stack=partial(stack_of_thread, self._reader),
        )
        reader = replace(reader, kind="waits", doing="waits", on=(learner.name,), mark=since)
        exits = tuple(Exit(CALLER, each.items, waits=True) if each.party == CALLER else each for each in look.exits)
        return replace(look, exits=exits, waits={**look.waits, CALLER: reader, learner.name: learner})

    def signs(self) -> Sequence[Sign]:
        """Silent faults of the rollout."""
        signs = self._signs()
        return () if signs is None else signs()

    def snapshot(self, report: Callable[[], Report]) -> dict[str, Any]:
        """What there is to see of the run that is watched, as `run_snapshot` has it; empty: there is none."""
        drive = self._drive
        try:
            return {} if drive is None else run_snapshot(drive.ring, report(), self.look(), self.diagnose())
        except RunError:  # it has not begun yet, or has just ended
            return {}

    def _traceable(self) -> Traceable | None:
        drive = self._drive
        if drive is None:
            return None
        found = drive.traceable
        return found._replace(meters=[*found.meters, self._learner])

    def _trace_update(self) -> None:
        """Record what the reader did with its last round, once the learner pipeline had made a batch of it."""
        held, self._held, trace = self._held, None, self._tracing.fragments
        if held is not None and trace is not None:
            given, learner_ns, fragments = held
            trace.update(fragments, given + self._learner.busy_ns - learner_ns, clock())

    def _end_stalled(self, error: StallError) -> None:
        if self._drive is not None:
            self._drive.end_stalled(error)
