"""What every rollout is to those who use it: a plain loop, an async one, or a node of a graph."""

import abc
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import anyio

from rollflow.nodes.closing import closing_on_error
from rollflow.nodes.drive import Drive, InlineDrive, PortalDrive, ThreadDrive
from rollflow.nodes.lag import LagBound
from rollflow.nodes.pace import AllOf, FragmentCredits
from rollflow.nodes.remote.remote_lanes import RemoteLanes
from rollflow.nodes.rounds import Emitted, Rounds
from rollflow.stream.errors import GraphError, RunError
from rollflow.stream.gate import Gate
from rollflow.stream.graph import Graph
from rollflow.stream.inline_run import can_run_inline
from rollflow.stream.meter import NodeMeter, clock
from rollflow.stream.report import CALLER, Report
from rollflow.stream.run import Run

T = TypeVar("T")
F = TypeVar("F", bound=Emitted)
Batch = dict[str, Any]


class RolloutLoop(abc.ABC, Generic[F]):
    """Runs a ring of nodes that gives fragments, and hands them out a round at a time, one of every lane.

        environments       the node that steps what there is to step
        lag                how old a fragment may be
        rounds             takes fragments and hands them out
        prefetch           rounds that it may run ahead of its reader, in a thread of its own; 0: it stands still while
                           the reader works

    It runs once.
    """

    def __init__(self, environments: Any, *, lag: LagBound, rounds: Rounds[F], prefetch: int) -> None:
        self.environments = environments
        self.lag = lag
        self._rounds = rounds
        is_bound = lag.max_lag is not None and lag.on_excess == "pace"
        ahead = min(prefetch, lag.max_lag or 0) if is_bound else prefetch
        self._fragments_per_lane = 1 + ahead  # that may be begun and not done with
        is_in_rounds = self._fragments_per_lane == 1 and environments.has_fixed_lanes
        first = range(environments.num_lanes) if is_in_rounds else ()
        self._credits = FragmentCredits(environments.num_lanes * self._fragments_per_lane, first=first)
        environments.lane_lost = self._credits.wait_no_more
        self._runs_ahead = prefetch > 0
        self._gates: list[Gate] = []  # that hold it back in a graph
        self._watching: list[Callable[[Any], None]] = []  # nodes that see its fragments there
        self._is_in_graph = False
        self._drive: Drive | None = None
        self._async_run: tuple[AbstractAsyncContextManager[Run], Run] | None = None
        self._state = "new"
        self._learner_meter = NodeMeter("learner_pipeline")

    # What a rollout is made of

    @abc.abstractmethod
    def _ring(self, gate: Gate | None) -> Graph:
        """The ring, with the output `fragments`; the gate lets a lane go on to its next step."""

    @abc.abstractmethod
    def _batch_of(self, fragments: Sequence[F]) -> Batch:
        """A train batch of a round."""

    def _check_before_graph(self, does: str) -> None:
        if self._is_in_graph:
            raise GraphError(f"the rollout is in a graph already, expected whoever {does} to come before that")

    def be_drawn_anew(self) -> None:
        """In a graph: let come who holds it back or watches it. The graph is to take it apart once more, behind that.

        Raises GraphError where it runs, or has run.
        """
        if self._state != "new" or self.environments.is_started:
            raise GraphError(
                "the rollout runs already, expected what holds it back, as a trainer's sink does, to be connected "
                "before `with rollout:`, and before it is run"
            )
        self._is_in_graph = False

    def _check_ready(self) -> None:
        """Raise where it can't be run as it has been put together."""

    def _with_parts(self, report: Report) -> Report:
        """The report, with what is counted elsewhere."""
        return report

    # Lanes that come and go while it runs

    def _follow_lanes(self, *stages: Any) -> None:
        """Have stages that count lanes, rounds and credits know of the lanes that hosts bring and take with them."""
        if isinstance(self.environments, RemoteLanes):
            self._counting = stages
            self.environments.joined, self.environments.left = self._lane_joined, self._lane_left

    def _lane_joined(self, lane: Any, fills_a_vacancy: bool) -> None:
        """Make room for a lane that has come."""
        for stage in self._counting:
            stage.expect(int(not fills_a_vacancy))
        self._credits.add(self._fragments_per_lane)
        self._rounds.size += int(not fills_a_vacancy)

    def _lane_left(self, lane: Any, was_the_last: bool) -> None:
        """A lane goes round for the last time; where it is the last, others are waited for."""
        self._credits.add(-self._fragments_per_lane)
        for stage in self._counting:
            stage.expect(int(was_the_last))
        self._rounds.size -= int(not was_the_last)

    # The graph

    def graph(self) -> Graph:
        """Its stages, joined to a ring, with the output `fragments`; what a `Graph` takes this node apart into.

        As a node of a graph the rollout runs ahead as far as the edges let it.
        """
        if self.lag.on_excess == "pace" and self.lag.max_lag is not None:
            raise GraphError(
                "on_excess='pace' is for a loop over the rollout; in a graph use 'drop' and a LearnerPipeline; where a "
                "trainer elsewhere makes the batches, TrainerStream(max_lag=…, on_excess='pace')"
            )
        self._is_in_graph = True
        ring = self._ring(AllOf(self._gates) if self._gates else None)
        for number, node in enumerate(self._watching):
            ring.add_node(name := f"seen_{number}", node)
            ring.connect(".".join(ring.outputs["fragments"].source), name)
        return ring

    # The loop

    def __enter__(self) -> Self:
        self._begin()
        with self._ending_on_error():
            ring = self._ring(self._credits)
            drive: type[Drive] = PortalDrive
            if can_run_inline(ring):
                drive = ThreadDrive if self._runs_ahead else InlineDrive
            self._drive = drive(ring, self._credits)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._drive is not None:
                self._drive.close(kind, error, traceback)
        finally:
            self._end()

    async def __aenter__(self) -> Self:
        self._begin()
        with self._ending_on_error():
            running = self._ring(self._credits).run()
            self._async_run = running, await running.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        assert self._async_run is not None
        try:
            return await self._async_run[0].__aexit__(kind, error, traceback)
        finally:
            self._end()

    def fragments(self) -> "Stream[F]":
        """The fragments, one after the other: `for fragment in …` or `async for fragment in …`.

        Without `prefetch` the environments stand still until every lane's fragment has been taken and the next is
        asked for. A fragment without a transition, all of whose rows are dead, is left out. Ends after `drain()`, or
        when every lane has given its `num_fragments`.
        """
        return Stream(self, self._rounds.hand_out)

    def batches(self) -> "Stream[Batch]":
        """Train batches, each of one fragment of every lane, from the learner pipeline: column -> tensor `any[B, ...]`.

        Rows are in the order of the fragments' episodes: lane by lane, slot by slot, then by time.
        """
        return Stream(self, self._batches)

    def hold_back(self, gate: Gate) -> None:
        """As a node of a graph: have a lane begin a fragment only when the gate admits the lane.

        Raises GraphError where the graph has it already.
        """
        self._check_before_graph("holds it back")
        self._gates.append(gate)

    def watch(self, node: Callable[[Any], None]) -> None:
        """As a node of a graph: have a synchronous node without outputs see every fragment, before it leaves here.

        Raises GraphError where the graph has it already.
        """
        self._check_before_graph("watches it")
        self._watching.append(node)

    def drain(self) -> None:
        """Stop the environments: the iterators give what is under way, unfinished fragments cut short, and end.

        To be called where the loop is. Raises RunError when the rollout is not running.
        """
        if self._state != "running":
            raise RunError(f"the rollout is not running, it is {self._state}: nothing to drain")
        if self._drive is not None:
            self._drive.drain()
        elif self._async_run is not None:
            self._async_run[1].stop()

    def report(self) -> Report:
        """What every stage has counted so far, and which one holds the others back.

        The learner pipeline, which works when `batches()` is asked for the next, is a stage by itself. Raises RunError
        when the rollout is not running, or is a node of a graph: the graph's run has the report then.
        """
        if self._drive is not None:
            return self._told(self._drive.report())
        if self._async_run is not None:
            return self._told(self._async_run[1].report())
        if self._is_in_graph:
            raise RunError(
                "the rollout is in a graph, whose run has the report: expected run.report(), of 'async with "
                "graph.run() as run'"
            )
        raise RunError(f"the rollout is not running, it is {self._state}: nothing to report")

    @property
    def num_steps(self) -> int:
        """Transitions that the environments have made."""
        steps: int = self.environments.num_steps
        return steps

    @property
    def lost(self) -> dict[str, int]:
        """Transitions made but never handed out, by cause: `max_lag`, and, once it has been left, `closed`.

        `workers` counts those that were under way in workers and on hosts that were lost: nobody knows whether they
        were made. Of hosts that made whole rollouts it counts what they had told of and not sent.

        As a node of a graph: those that were not cut into a fragment when the run was left. What the graph's edges
        then drop, they count themselves.
        """
        lost = {"max_lag": self.lag.dropped_steps, "workers": self.environments.lost_steps}
        if self._state == "new" and self.environments.is_closed:
            lost["closed"] = self.environments.uncut_steps
        if self._state == "closed":
            lost["closed"] = self.num_steps - self._rounds.handed_steps - self.lag.dropped_steps
        return {cause: steps for cause, steps in lost.items() if steps}

    # Inside

    def _told(self, report: Report) -> Report:
        return self._with_parts(report.moved(CALLER, self._learner_meter))

    def _begin(self) -> None:
        if self._state != "new":
            raise RunError(f"the rollout is {self._state}: it runs once, make another one")
        self._check_ready()
        self._state = "running"

    @contextmanager
    def _ending_on_error(self) -> Iterator[None]:
        """Close the environments where the rollout can't be entered: nobody leaves it then."""
        try:
            with closing_on_error(self.environments.close):
                yield
        except BaseException:
            self._end()
            raise

    def _not_entered(self, expected: str) -> str:
        entered = "by 'async with'" if self._drive is None else "by 'with'"
        told = f"running, entered {entered}" if self._state == "running" else self._state
        return f"the rollout is {told}; this loop expects: {expected}"

    def _end(self) -> None:
        self._state = "closed"

    def _take_rounds(self) -> Iterator[None]:
        """Have a round ready to be handed out, again and again, until no more fragments come."""
        drive, rounds = self._drive, self._rounds
        if drive is None or self._state != "running":
            raise RunError(self._not_entered("with Rollout(...) as rollout, and for"))
        while True:
            if rounds.is_empty:
                rounds.give_back(drive.release)
                while not rounds.is_full and (fragment := drive.next()) is not None:
                    rounds.take(fragment, drive.release)
                if rounds.is_empty:
                    return
            yield

    async def _take_rounds_async(self) -> AsyncIterator[None]:
        rounds = self._rounds
        if self._async_run is None or self._state != "running":
            raise RunError(self._not_entered("async with Rollout(...) as rollout, and async for"))
        output = self._async_run[1]["fragments"]
        while True:
            if rounds.is_empty:
                rounds.give_back(self._credits.release)
                while not rounds.is_full:
                    try:
                        rounds.take(await output.receive(), self._credits.release)
                    except anyio.EndOfStream:
                        break
                if rounds.is_empty:
                    return
            yield

    def _batches(self) -> Iterator[Batch]:
        """The batch of a round; none where all of it has become too old, or has nothing to learn from."""
        before = self._rounds.handed_steps
        # In the lanes' order, in whichever they came.
        fragments = sorted(self._rounds.hand_out(), key=lambda fragment: (fragment.lane, fragment.sequence))
        if not fragments:
            return
        began = clock()
        try:
            batch = self._batch_of(fragments)
        except BaseException:
            self._rounds.handed_steps = before
            raise
        self._learner_meter.busy_ns += clock() - began
        if batch:
            self._learner_meter.items += 1
            yield batch


class Stream(Generic[T]):
    """What `fragments()` and `batches()` give: for `for` or `async for`, as the rollout was entered."""

    def __init__(self, rollout: RolloutLoop[Any], made: Callable[[], Iterator[T]]) -> None:
        self._rollout = rollout
        self._made = made

    def __iter__(self) -> Iterator[T]:
        for _ in self._rollout._take_rounds():
            yield from self._made()

    async def __aiter__(self) -> AsyncIterator[T]:
        async for _ in self._rollout._take_rounds_async():
            for item in self._made():
                yield item
