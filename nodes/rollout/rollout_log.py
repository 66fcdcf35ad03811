"""RolloutLog: what a rollout logs, in a loop and in a graph."""

import weakref
from collections.abc import Callable
from typing import Any

from rollflow.nodes.logs.destinations import LogOptions
from rollflow.nodes.logs.figures import Counts
from rollflow.nodes.logs.run_log import RunLog
from rollflow.stream.data.errors import GraphError, RunError
from rollflow.stream.graph.meter import clock
from rollflow.stream.graph.report import Report
from rollflow.stream.observe.trace import FragmentTrace


class RolloutLog(RunLog):
    """The log of a rollout, to be called for one's own values: `rollout.log("train/loss", loss)`.

    rollout    a `RolloutLoop`, whose counts are logged
    note       counts a fragment that leaves the rollout in a graph
    options    where to, how often, and by which x axis

    rounds     that the reader of a loop was given; in a graph, rounds of fragments that have left it
    """

    def __init__(self, rollout: Any, note: Callable[[Any], None], options: LogOptions) -> None:
        super().__init__(options)
        self.rounds = 0
        self._find_rollout = weakref.ref(rollout)  # it holds its log
        self._note, self._trace = note, options.trace
        self._report: Callable[[], Report] | None = None  # of the run of a graph
        rollout.lag.is_asked = bool(options.texts)

    def go_on_from(self, steps: int, updates: int) -> None:
        """Count on from the environment steps and the rounds of an earlier run. Before it begins."""
        super().go_on_from(steps, updates)
        self.rounds = updates

    def node(self) -> Callable[[Any], None]:
        """The node that sees the fragments in a graph, also where nothing is written: `snapshot()` has figures, too.

        Raises GraphError where the rollout is to write a trace: the graph's run does that.
        """
        if self._trace is not None:
            raise GraphError("trace is for a loop over the rollout, expected graph.run(trace=…) in a graph")
        return _LogNode(self, self._note, self._rollout)

    def follow(self, report: Callable[[], Report]) -> None:
        """Take the stages from the report of a graph's run."""
        self._report = report

    def end_following(self) -> None:
        """End the log with the graph's run, whose last report stays."""
        self.end()
        if self._report is not None:
            last = self._report()
            self._report = lambda: last

    @property
    def _rollout(self) -> Any:
        rollout = self._find_rollout()
        if rollout is None:
            raise RunError("the rollout of this log is gone")
        return rollout

    def counts(self) -> Counts:
        """What the rollout has counted."""
        rollout = self._rollout
        rollout.lag.is_asked = True  # again, for the row after this one
        try:
            report = rollout.report() if self._report is None else self._report()
        except RunError:  # it has not begun yet
            report = None
        return Counts(
            steps=rollout.num_steps,
            updates=self.rounds,
            versions=rollout.lag.versions(),
            lag=rollout.lag.last,
            lost=rollout.lost,
            returns=rollout.returns,
            metrics=rollout.metrics,
            report=report,
        )


class _LogNode:
    """Node without outputs that counts the fragments of a rollout in a graph; its log begins and ends with the run."""

    def __init__(self, log: RolloutLog, note: Callable[[Any], None], rollout: Any) -> None:
        self._log, self._note, self._rollout = log, note, rollout
        self._fragments = self._rounds_before = 0
        self._trace: tuple[str, FragmentTrace] | None = None  # this node's name, and where its fragments' arrows end

    def __call__(self, fragments: Any) -> None:
        """Count one fragment."""
        rollout, trace = self._rollout, self._trace
        if trace is not None:
            trace[1].used((fragments.lane, fragments.sequence), trace[0], clock())
        self._note(fragments)
        rollout.hooks.tell_episodes()
        rollout.lag.look_at(fragments)
        self._fragments += 1
        self._log.rounds = self._rounds_before + self._fragments // max(1, rollout.environments.num_lanes)

    def take_report(self, report: Callable[[], Report]) -> None:
        """Begin the log, of a run that has this report."""
        self._rounds_before = self._log.rounds
        self._log.follow(report)
        self._log.begin()

    def take_trace(self, name: str, trace: FragmentTrace | None) -> None:
        """Have the fragments be traced to here, where they leave the rollout; None: no more."""
        self._trace = None if trace is None else (name, trace)

    def close(self) -> None:
        """End the log, and have the rollout leave the graph."""
        self._log.end_following()
        self._rollout.leave_graph()
