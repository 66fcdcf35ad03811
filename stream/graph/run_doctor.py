"""Doctors of runs: what watches them, traces them and shows them; and that of a run on an event loop."""

import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from os import PathLike
from threading import Event, Lock, Thread, current_thread
from typing import TYPE_CHECKING, Any

import anyio
import anyio.abc

from rollflow.stream.data.errors import StallError
from rollflow.stream.graph.counters import RunCounters
from rollflow.stream.graph.drawing import run_snapshot
from rollflow.stream.graph.meter import clock, node_trace
from rollflow.stream.graph.node import ending_quietly
from rollflow.stream.graph.report import Report
from rollflow.stream.graph.wakeup import Wakeup
from rollflow.stream.observe.run_socket import RunSocket
from rollflow.stream.observe.stacks import answering_dumps, stack_of_thread
from rollflow.stream.observe.trace import FragmentTrace, Trace, open_trace
from rollflow.stream.observe.waits import CALLER, Diagnosis, Look, Probe, Sign, Wait
from rollflow.stream.observe.watch import StallRules, StallWatch

if TYPE_CHECKING:
    from rollflow.stream.graph.run import Run


logger = logging.getLogger("rollflow.doctor")


def _call_if_there(end: Callable[[], None] | None) -> None:
    """End a run's trace; None: the run has been forgotten."""
    if end is not None:
        end()


class Doctor(Probe):
    """Watches a run from a thread, writes a trace of it, and shows it to who asks through a socket. A probe itself.

    counters   of the run
    rules      when and how it speaks
    snapshot   method that gives what there is to see of the run; held weakly
    trace_to   file for a trace; None: there is none

    is_over    whether it watches no more
    traced     the trace of a rollout's own lanes; None: nothing is traced

    Nodes that have a method `take_trace(name, trace)` are given their name and a `FragmentTrace`, and None at its end.
    """

    def __init__(
        self,
        counters: RunCounters,
        rules: StallRules,
        snapshot: Callable[[], dict[str, Any]],
        trace_to: str | PathLike[str] | None,
    ) -> None:
        self._counters, self._rules, self._trace_to = counters, rules, trace_to
        self.is_over = False
        self._watch = StallWatch(weakref.proxy(self), rules)
        self._stopping = Event()
        self._thread: Thread | None = None
        self._answering = ExitStack()
        self.traced: FragmentTrace | None = None
        self._end_trace: Callable[[], object] | None = None  # while there is a trace
        self._lock = Lock()  # held while the trace begins, and while it is taken from what writes it
        self._socket = RunSocket(snapshot)

    def start(self) -> None:
        """Begin. Raises OSError if the trace can't be written."""
        if self._trace_to is not None:
            self._begin_trace(self._trace_to)
        if self._rules.after is not None and not self._stopping.is_set():
            self._answering.enter_context(answering_dumps())
            arguments = weakref.ref(self), self._watch, self._rules, self._stopping
            self._thread = Thread(target=_watch_run, args=arguments, name="rollflow doctor", daemon=True)
            self._thread.start()
        self._socket.start()

    def stop(self) -> None:
        """Watch no more, and answer no signal of `rollflow doctor`; again does nothing. From any thread."""
        self._socket.stop()
        self._stopping.set()
        if self._thread is not None and self._thread is not current_thread():
            self._thread.join(1.0)
        self._answering.close()
        self.end_trace()
        self.is_over = True

    def seen(self, report: Report) -> dict[str, Any]:
        """What there is to see of the run, with its report."""
        return run_snapshot(self._counters.graph, report, self.diagnose())

    def diagnose(self) -> Diagnosis:
        """What the run waits for right now."""
        return self._watch.diagnose()

    # The trace

    def _begin_trace(self, path: str | PathLike[str]) -> None:
        """Begin a trace to a file. Raises OSError if it can't be written."""
        graph, end = self._counters.graph, weakref.WeakMethod(self.end_trace)
        with self._lock:
            trace = Trace(open_trace(path), f"rollflow {graph.name}", lambda: _call_if_there(end()))
            self._end_trace = weakref.finalize(self, trace.close)  # also where a run is forgotten, or the program ends
            self.traced = FragmentTrace(trace, "")
            rollouts = {"": self.traced}  # by the prefix of their nodes
            for name, take_trace in graph.having("take_trace"):
                prefix = "".join(name.rpartition("/")[:2])
                take_trace(name, rollouts.setdefault(prefix, FragmentTrace(trace, prefix)))
            for meter in self._counters.meters:
                meter.take_trace(node_trace(trace, meter.name))

    def end_trace(self) -> None:
        """End the trace, written to its end; again does nothing. From any thread."""
        with self._lock:
            end, self._end_trace = self._end_trace, None
            self.traced = None
            if end is not None:
                self._take_from()
        if end is not None:
            end()  # waits for the trace's thread, which may wait for the lock

    def _take_from(self) -> None:
        """Have no meter and no node write any more; what is under way is written as far as it has come."""
        under_way = self._counters.under_way
        for meter in self._counters.meters:
            busy, now = meter.trace, clock()
            meter.take_trace(None)
            if busy is not None and meter.name in under_way:
                busy["busy"](now - under_way[meter.name], now)
        for name, take_trace in self._counters.graph.having("take_trace"):
            take_trace(name, None)


def _watch_run(doctor: "weakref.ref[Doctor]", watch: StallWatch, rules: StallRules, stopping: Event) -> None:
    """Log what a run's watch finds, until the doctor stops or is gone."""
    while not stopping.wait(rules.look_s) and doctor() is not None:
        try:
            texts, stall = watch.look()
        except ReferenceError:  # the run is gone
            break
        except Exception:  # the run goes on without its doctor
            logger.exception("the stall doctor has failed, and looks no more")
            return
        for text in texts:
            logger.warning("%s", text)
        own = doctor()
        if stall is not None and rules.on_stall == "raise" and own is not None:
            own.end_stalled(StallError(str(stall)).see("stall"))
        del own
    for text in watch.finish():
        logger.warning("%s", text)


class RunDoctor(Doctor):
    """The doctor of a run on an event loop.

    run        that is watched
    """

    def __init__(self, run: "Run", rules: StallRules, trace_to: str | PathLike[str] | None) -> None:
        super().__init__(run.counters, rules, self.snapshot, trace_to)
        self._run: Run = weakref.proxy(run)  # it holds its doctor
        self._bell: Wakeup | None = None
        self._error: StallError | None = None

    def listen(self, tasks: anyio.abc.TaskGroup) -> None:
        """Begin, with the run's tasks. In the event loop."""
        if self._rules.on_stall == "raise":
            self._bell = Wakeup()
            tasks.start_soon(ending_quietly, partial(self._await_stall, self._bell))
        self.start()

    def stop(self) -> None:
        """End the thread. Once the tasks have ended."""
        super().stop()
        if self._bell is not None:
            self._bell.close()
        self._error = None  # whose traceback refers to this

    def look(self) -> Look | None:
        return None if self._run.has_ended else self._counters.look()

    def signs(self) -> Sequence[Sign]:
        """Silent faults of composite nodes."""
        wholes = self._counters.graph.methods_of_wholes.items()
        found = [(prefix[:-1], each) for prefix, whole in wholes if "signs" in whole for each in whole["signs"]()]
        return [Sign(f"{prefix} {sign.kind}", f"{prefix}: {sign.text}") for prefix, sign in found]

    def snapshot(self) -> dict[str, Any]:
        """What there is to see of the run, with a part for each composite node that shows itself."""
        graph = self._counters.graph
        return {
            "kind": "graph",
            "name": graph.name,
            **self.seen(self._counters.report()),
            "parts": {
                prefix[:-1]: whole["snapshot"]()
                for prefix, whole in graph.methods_of_wholes.items()
                if "snapshot" in whole
            },
        }

    def end_stalled(self, error: StallError) -> None:
        if self._bell is not None:
            self._error = error
            self._bell.ring()

    async def _await_stall(self, bell: Wakeup) -> None:
        """End the run by a stall, if there is one."""
        await anyio.wait_readable(bell.fileno())
        assert self._error is not None
        self._run.end(self._error)
        raise self._error


def behind_loop(look: Look, since: int, calls: int, thread: int) -> Look:
    """A look in which the reader waits for an event loop that something holds up.

    since     time of the event that it has not come to, in ns
    calls     events that it has come to
    thread    that it runs in
    """
    doing, age_s = "is held up by a task or a callback", (clock() - since) / 1e9
    remedy, stack = "await there, or do it in a thread, by anyio.to_thread.run_sync", partial(stack_of_thread, thread)
    held = Wait("the event loop", "call", doing, mark=since, age_s=age_s, calls=calls, remedy=remedy, stack=stack)
    behind = {CALLER: replace(look.waits[CALLER], on=(held.name,)), held.name: held}
    return replace(look, waits={**look.waits, **behind})
