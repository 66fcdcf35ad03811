"""A rollout as its users have it: a plain loop, an async one, or a node of a graph."""

import abc
import logging
import os
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Lock, get_ident
from typing import Any, Generic, Self, TypeVar

import anyio
import anyio.to_thread

from rollflow.nodes.argument_checks import check_flags, check_numbers, is_whole
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2
from rollflow.nodes.connectors.pipelines.default_pipelines import LearnerConnectorPipeline
from rollflow.nodes.env.environments import Environments, EnvKind
from rollflow.nodes.env.workers.process_environments import ProcessEnvironments
from rollflow.nodes.env.workers.thread_node import ThreadEnvironments
from rollflow.nodes.logs.destinations import LogOptions
from rollflow.nodes.logs.figures import Counts
from rollflow.nodes.logs.run_log import RunLog
from rollflow.nodes.metrics.episode_returns import C
from rollflow.nodes.offloaded.lane_state import check_lanes, fragment_in, go_on, plain_fragment, state_of_lane
from rollflow.nodes.offloaded.offloaded import AgentEmitter, Emitter, OffloadedRollouts, ring_of_turns
from rollflow.nodes.offloaded.rollout_processes import RolloutProcesses
from rollflow.nodes.rollout.checkpoint import (
    RunCheckpoints,
    State,
    generators,
    kept_of,
    keywords_of,
    layout_of,
    read,
    set_generators,
)
from rollflow.nodes.rollout.drivers import Driver, RolloutDoctor
from rollflow.nodes.rollout.evaluations import Evaluations, Played
from rollflow.nodes.rollout.options import JOINT_PASSES, RolloutOptions, metrics_of
from rollflow.nodes.rollout.placement import place
from rollflow.nodes.rollout.schedule import Recording, ReplayedCredits, ReplayedForward, ReplayedRun, sum_of_weights
from rollflow.nodes.stages.acting import Acting, lookback_for
from rollflow.nodes.stages.module_set import AgentsActing
from rollflow.nodes.stages.ring import joint_forward, ring_of
from rollflow.nodes.stages.rounds import (
    FragmentCredits,
    FragmentRounds,
    LagBound,
    LaneGates,
    OrderedCredits,
    RolloutIterator,
)
from rollflow.stream.data.closing import closing_on_error, holding_interrupts, noting_in
from rollflow.stream.data.errors import CheckpointError, GraphError, RunError, shown, warn_caller
from rollflow.stream.data.infos import copied
from rollflow.stream.data.loss_ledger import Ledger, cause_of
from rollflow.stream.fragments.fragment import NoFragment
from rollflow.stream.fragments.lane import Lane
from rollflow.stream.graph.background import AtWork
from rollflow.stream.graph.graph import Graph
from rollflow.stream.graph.meter import NodeMeter, clock
from rollflow.stream.graph.node import Gate
from rollflow.stream.graph.report import LEARNER, Report, node_report
from rollflow.stream.multi_agent.multi_agent_fragment import AnyFragment
from rollflow.stream.multi_agent.multi_agent_lane import MultiAgentLane
from rollflow.stream.observe.graph_picture import run_html
from rollflow.stream.observe.stacks import outside_of_rollflow
from rollflow.stream.observe.trace import FragmentTrace
from rollflow.stream.observe.waits import CALLER, Diagnosis, Sign

logger = logging.getLogger(__name__)
F = TypeVar("F", bound=AnyFragment)
T = TypeVar("T")
_IN_ORDER: tuple[type, ...] = (Environments, ThreadEnvironments, ProcessEnvironments, RolloutProcesses)
# Options that a replay must have like the run that it replays.
_DECIDING = "seed", "slot_seeds", "num_fragments", "autoreset_mode", "explore", "max_lag", "on_excess"
_EVEN = Lane, MultiAgentLane  # whose slots step together


class RolloutLoop(abc.ABC, Generic[F]):
    """Runs a ring of nodes that gives fragments, and hands them out a round at a time, one of every lane, once.

    env        environments, as they were given
    options    its keywords
    given      those that it was given, and `env`, for `resume`
    rollout    class of the rollout
    kind       of its environments
    """

    returns: Any

    def __init__(
        self, env: Any, options: RolloutOptions, *, given: Mapping[str, Any], rollout: type, kind: EnvKind
    ) -> None:
        self._env, self.seed, self._given = env, options.seed, given
        self.environments, self.placement, options = place(env, options, rollout=rollout, kind=kind)
        with closing_on_error(self.environments.close):
            self._options, self.stall, self.metrics = options, options.watch.stall_rules(), metrics_of(options.watch)
            schedule = options.schedule
            acts: Any = self._make_acting(options)
            self.environments.set_chosen_spaces(acts.chosen_spaces())
            self._acting, self.module = acts, acts.module
            for pipeline in acts.pipelines:
                pipeline.refuse_edits_while_run_by(self)
                pipeline.fuses = pipeline.fuses and not options.debug
            self._make_learner()
            bound = options.max_lag, options.on_excess
            self.lag = lag = LagBound(acts.versions, *bound, trained=options.modules_to_train)
            self.ledger = Ledger()  # of fragments in a graph
            self._relay = LaneGates(self.environments)
            self._counting: Any  # stage that counts the lanes that come by
            of_lanes = {"num_lanes": self.environments.num_lanes, "num_fragments": options.num_fragments}
            of_lanes |= {"ledger": self.ledger, "relay": self._relay}
            begin_lane: Callable[[Any], None] | None = None
            if isinstance(self.environments, OffloadedRollouts):
                self.environments.act_with(acts, options.pass_options, self.metrics, self._relay)
                self._counting = (AgentEmitter if kind.has_several else Emitter)(**of_lanes)
                self._draw = partial(ring_of_turns, self.environments, self._counting)
            else:
                self._counting, forward, act = acts.stages(
                    self.environments, options.pass_options, self.metrics, **of_lanes
                )
                largest = max(env.num_envs for env in self.environments.envs) * acts.most_agents
                alone, forward = forward, joint_forward(forward, largest, options.forward)
                if isinstance(schedule, ReplayedRun) and forward is not alone:
                    forward = ReplayedForward(alone, schedule)
                if schedule is not None:
                    schedule.take(acts.by_id, self.environments, self._counting, forward)
                self._draw = partial(ring_of, self.environments, self._counting, forward, act)
                begin_lane = partial(acts.begin_lane, seed=options.seed)
            of_credits = self.environments, lag, options.prefetch, self._counting, begin_lane
            by_lane = options.deterministic
            if isinstance(schedule, Recording):
                expected = "'inline', 'threads' or 'processes', with lanes=… for max_batch"
                self._check_place("Watch(record=…) is", _IN_ORDER[:3], expected)
            if isinstance(schedule, ReplayedRun):
                self._credits: FragmentCredits = ReplayedCredits(*of_credits, replay=schedule, by_lane=by_lane)
            elif by_lane:
                self._check_deterministic()
                self.environments.keeps_order = True
                self._credits = OrderedCredits(*of_credits, acting=acts)
            else:
                self._credits = FragmentCredits(*of_credits)
            self._rounds: FragmentRounds[F] = FragmentRounds(self._credits, lag, self.returns, by_lane=by_lane)
            self._rounds.schedule = schedule
            self.log = RolloutLog(self, self._rounds.note, options.log_to)
        self.hooks = self._rounds.hooks
        self._ended_by: str | None = None  # the cause, of a loop
        self._interrupted_by = ""  # name of the KeyboardInterrupt, or the like, that ended a loop
        self._steps_before = 0  # of an earlier run, which this one goes on with
        self._lost_before: Counter[str] = Counter()  # likewise
        self._waiting: Sequence[Any] = ()  # fragments of an earlier run, which were not taken
        self._is_restored = False  # its lanes stand where those of an earlier run stood
        self._generators: Any = None  # of an earlier run: states of the shared generators
        self._is_in_graph = False  # once a graph has taken it apart: no gate or node may be added then
        self._gates: list[Gate] = []  # of a graph, which hold it back
        self._watching: list[Callable[[Any], None]] = []  # nodes of a graph, which see its fragments
        self._drive: Driver | None = None
        self._is_async = False  # entered by 'async with'
        self._state = "new"
        self._closing = Lock()  # held from the first call on that ends the run: others may come from other threads
        self._learner_meter = NodeMeter(LEARNER)
        self._notes_told = 0  # of the environments
        self._doctor: RolloutDoctor | None = None
        self._checkpoints = RunCheckpoints(self._captured, options.checkpoints)
        self._beside: list[Evaluations] = []
        if options.checkpoints is not None:
            self.environments.record_actions()

    def _check_deterministic(self) -> None:
        """Raise ValueError if lanes can't be kept in order where they are."""
        if self._options.forward.max_batch is not None:
            raise ValueError(f"deterministic=True, but {JOINT_PASSES}, which are of whoever is ready; expected neither")
        self._check_place("deterministic=True is", _IN_ORDER, "'inline', 'threads', 'processes' or 'rollouts'")

    def _check_place(self, what: str, places: tuple[type, ...], expected: str) -> None:
        """Raise ValueError, from `what` to `expected`, for another place than those."""
        if not isinstance(self.environments, places):
            raise ValueError(
                f"{what} for environments that step here, in threads or in worker processes, and these are "
                f"{type(self.environments).__name__}; expected where={expected}"
            )

    # Parts of a rollout

    def explain(self) -> str:
        """A text on how it runs: tasks, what each edge holds, and why it goes where it goes."""
        self._prepare_lanes()
        text = self._draw(self._credits).explain()
        return f"{text}\n{self.placement}" if self.placement else text

    def _ring(self, gates: Sequence[Gate]) -> Graph:
        """The ring, with the output `fragments`; the gates let a lane go on to its next step."""
        self._prepare_lanes()
        self._relay.take(gates)
        return self._draw(self._relay.gate)

    def _prepare_lanes(self) -> None:
        """Have lanes for the pipelines as they are: they may have been edited."""
        if not (self.environments.is_started or self._is_restored):
            self._make_lanes()

    def _make_lanes(self) -> None:
        """Have lanes for the pipelines as they are."""
        acting, pipelines = self._acting, (*self._acting.pipelines, *self._learner_pipelines().values())
        lookback = lookback_for(self._options.lookback, pipelines, stateful=acting.is_stateful)
        acting.make_lanes(self.environments, lookback, self.seed)

    @abc.abstractmethod
    def _make_acting(self, options: RolloutOptions) -> Acting | AgentsActing:
        """Make what acts, and `returns`, which has those of the last episodes."""

    @abc.abstractmethod
    def _make_learner(self) -> None:
        """Make the learner pipeline, or one for each module."""

    @abc.abstractmethod
    def _learner_pipelines(self) -> Mapping[str, LearnerConnectorPipeline]:
        """The learner pipelines that there are now, by their names in checkpoints."""

    def _check_fits(self) -> None:  # several agents have nothing to check
        """Raise ModuleError if its parts don't fit together: nothing has begun yet."""

    @abc.abstractmethod
    def _batch_of(self, fragments: Sequence[F]) -> Batch:
        """A train batch of a round."""

    def be_drawn_anew(self) -> None:
        """As a node of a graph: allow `hold_back` and `watch` again, after which the graph takes it apart once more.

        Raises GraphError if it runs, or has run.
        """
        if self._state != "new" or self.environments.is_started:
            raise GraphError(
                "the rollout runs already; expected a sink that holds it back, such as TrainerSink, to be connected "
                "before the graph is run, and no `with rollout:` around a graph or feed, which run it themselves"
            )
        self._is_in_graph = False

    def leave_graph(self) -> None:
        """As a node of a graph whose run is over: let go of what held it back and watched it."""
        self._gates, self._watching = [], []
        self._relay.take(())

    @abc.abstractmethod
    def _slowest_learner_piece(self) -> str:
        """Name of the piece that took most of the time of the learner pipeline."""

    # The graph

    def graph(self) -> Graph:
        """Its stages, joined to a ring, with the output `fragments`. A `Graph` takes this node apart into them.

        As a node of a graph the rollout runs ahead as far as the edges let it.
        """
        if self.lag.is_pacing:
            raise GraphError(
                "on_excess='pace' is for a loop over the rollout; in a graph use 'drop' and a LearnerPipeline; where a "
                "trainer elsewhere makes the batches, TrainerStream(max_lag=…, on_excess='pace')"
            )
        if self._options.checkpoints is not None:
            raise GraphError(
                "checkpoints are saved by a loop over the rollout, and no graph has one; expected none, or "
                "stream.save() where a trainer elsewhere has the loop"
            )
        if self._options.schedule is not None:
            raise GraphError("record and replay of Watch are for a loop over the rollout, expected neither in a graph")
        self._check_fits()
        self._is_in_graph, self.environments.may_wait = True, False
        self.environments.report_lanes_to(self._credits)
        ring = self._ring(self._gates)
        nodes = {f"seen_{number}": node for number, node in enumerate(self._watching)}
        for name, node in {**nodes, "figures": self.log.node()}.items():
            ring.add_node(name, node)
            ring.connect(".".join(ring.outputs["fragments"].source), name)
        return ring

    # The loop

    def __enter__(self) -> Self:
        self._enter(has_thread=bool(self._options.prefetch))
        return self

    def _enter(self, *, has_thread: bool, is_async: bool = False) -> None:
        if self._state != "new":
            raise RunError(f"the rollout is {self._state}: it runs once, make another one")
        self._check_fits()
        self.environments.report_lanes_to(self._credits)
        self._state, self._is_async = "running", is_async
        with self._ending_on_error():
            self._begin_schedule()
            self.log.begin()
            self._drive = Driver(self._ring([self._credits]), self._credits, has_thread=has_thread)
            self.environments.has_own_thread = has_thread
            of_every_doctor = self.stall, self.snapshot, self._options.watch.trace
            self._doctor = RolloutDoctor(self._drive, self._learner_meter, self.signs, *of_every_doctor)
            self._doctor.start()
            self._checkpoints.begin()
            self._drive.begin_with(self._waiting)
            self._waiting = ()
            with self._rounds.noting_failure():
                self._drive.start()
            if self._generators is not None:
                set_generators(self._generators)

    def _begin_schedule(self) -> None:
        """Begin to record, or to replay. Raises ValueError for what can't be, and CheckpointError."""
        schedule, environments, acting = self._options.schedule, self.environments, self._acting
        if schedule is None:
            return
        if wrong := next((type(lane).__name__ for lane in environments.lanes if type(lane) not in _EVEN), None):
            raise ValueError(
                f"a run with a {wrong} can't be recorded; expected environments that step in lock step, here"
            )
        settings = {name: str(getattr(self._options, name)) for name in _DECIDING}
        settings |= {name: str(each) for name, each in layout_of(environments).items()}
        settings["deterministic"] = str(self._options.deterministic)
        settings |= {"max_batch": str(self._options.forward.max_batch), "steps before": str(self.num_steps)}
        settings |= {f"pieces of {name}": str(pipeline.names) for name, pipeline in acting.named_pipelines}
        for module_id, (module, _) in acting.by_id.items():
            if hasattr(module, "state_dict"):
                settings[f"first weights of {module_id}"] = f"{sum_of_weights(module.state_dict()):08x}"
        schedule.begin(settings, {"seed": self.seed, "lanes": environments.num_lanes})

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        with holding_interrupts(error):
            if self._state in ("closing", "closed") or not self._closing.acquire(blocking=False):
                return
            error_before = error or self._rounds.error
            try:
                if error_before is None:
                    self._checkpoints.save_last()
            finally:
                self._state = "closing"
                self._stop_doctor()
                try:
                    if self._drive is not None:
                        with noting_in(error, "the rollout"):
                            self._drive.close(error)
                finally:
                    self._end(error_before)

    def start(self) -> Self:
        """Begin to run, as `with rollout:` does, for a run that spans cells of a notebook; `close()` ends it.

        Returns the rollout. Raises RunError if it has been started, or closed, before.
        """
        return self.__enter__()

    def close(self) -> None:
        """End the run, as the end of `with rollout:` does, and close the environments; again does nothing.

        From any thread. A loop over the rollout raises RunError then; after `drain()` it ends by itself. A rollout that
        was never started closes its environments. Raises what the run raised and no loop has, and RunError if an
        `async with` or a graph's run is to close it.
        """
        if self._state == "running" and self._is_async:
            raise RunError(
                "the rollout is running, entered by 'async with', which closes it: expected its block to end"
            )
        if self._state == "running":
            self.__exit__(None, None, None)
        elif self._state == "new" and not self.environments.is_closed:
            if self.environments.is_started:
                raise RunError("the rollout runs in a graph, whose run closes it: expected the run's block to end")
            if self._closing.acquire(blocking=False):
                self._end(None)
                self.environments.close()

    def __repr__(self) -> str:
        state = self._state
        if self._is_in_graph and state == "new":
            state = "ended" if self.environments.is_closed else "in a graph"
        return f"<{type(self).__name__} {state}: {self.environments.describe()}, {self.num_steps:,} steps made>"

    def _repr_html_(self) -> str:
        return run_html(repr(self), self.snapshot())

    async def __aenter__(self) -> Self:
        self._enter(has_thread=not self._options.is_in_loop, is_async=True)
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if self._options.is_in_loop:
            self.__exit__(kind, error, traceback)
            return
        with anyio.CancelScope(shield=True):  # other tasks go on meanwhile
            await anyio.to_thread.run_sync(self.__exit__, kind, error, traceback)
        assert self._drive is not None
        self._drive.close_news()

    def fragments(self, *, complete_episodes: bool = False, progress: bool = False) -> RolloutIterator[F]:
        """The fragments, one after the other: `for fragment in …` or `async for fragment in …`.

        Without `prefetch` the environments stand still until every lane's fragment has been taken and the next is
        asked for. A fragment without a transition, all of whose rows are dead, is left out. Ends after `drain()`, or
        when every lane has given its `num_fragments`.

            complete_episodes    hand out whole episodes alone: for each fragment that has ended some, a fragment of
                                 those. Transitions of open episodes are copied and held until the end
                                 of their episode, so memory grows with the longest ones; those whose episodes have
                                 not ended when the run does are counted in `lost["incomplete"]`. An episode may span
                                 several policy versions
            progress             show steps per second, mean return and version, as `log="progress:"` does

        Raises ValueError for `complete_episodes` with `max_lag`.
        """
        return self._iterator(self._rounds.hand_out, complete_episodes, progress)

    def batches(self, *, complete_episodes: bool = False, progress: bool = False) -> RolloutIterator[Batch]:
        """Train batches, each of one fragment of every lane, from the learner pipeline: column -> tensor `any[B, ...]`.

        Rows are in the order of the fragments' episodes: lane by lane, slot by slot, then by time.

            complete_episodes    of the episodes that the fragments have ended, each whole: see `fragments`
            progress             show how it goes: see `fragments`
        """
        return self._iterator(self._batches, complete_episodes, progress)

    def hold_back(self, gate: Gate) -> None:
        """As a node of a graph: have a lane begin a fragment only when the gate admits the lane.

        Raises GraphError if the graph has it already.
        """
        self._refuse_in_graph("holds it back")
        self._gates.append(gate)

    def stands_still(self, stopped: Collection[int], given: Mapping[int, int]) -> bool:
        """As a node of a graph: whether every lane has stopped, or ended, and all that it has made has come.

        stopped    numbers of lanes that stand at a gate which is shut
        given      lane -> number of its fragments that have come
        """
        last = self._options.num_fragments
        return all(
            given.get(lane.index, 0) == lane.sequence and (lane.index in stopped or lane.sequence == last)
            for lane in self.environments.lanes
        )

    def watch(self, node: Callable[[Any], None]) -> None:
        """As a node of a graph: have a synchronous node without outputs see every fragment, before it leaves here.

        Raises GraphError if the graph has it already.
        """
        self._refuse_in_graph("watches it")
        self._watching.append(node)

    def _refuse_in_graph(self, does: str) -> None:
        if self._is_in_graph:
            raise GraphError(f"the rollout is in a graph already, expected what {does} to come before that")

    @property
    def is_running(self) -> bool:
        """True while it runs: within its block, or in a graph from the first reset to the end of the graph's run."""
        is_in_run = self.environments.is_started and not self.environments.is_closed
        return self._state in ("running", "closing") or (self._state == "new" and is_in_run)

    def drain(self) -> None:
        """Stop the environments: loops get what is under way, unfinished fragments cut short, and end.

        To be called in the loop's thread. Raises RunError when the rollout is not running.
        """
        if self._state != "running":
            raise RunError(f"the rollout is not running, it is {self._state}: nothing to drain")
        if isinstance(self._options.schedule, ReplayedRun):
            raise RunError("a replay can't be drained: which steps were the last ones is not recorded")
        assert self._drive is not None
        self._drive.drain()

    def report(self) -> Report:
        """A report of what every stage has counted so far, and of the one that holds the others back.

        The learner pipeline, which works when `batches()` is asked for the next, is a stage by itself. Raises RunError
        when the rollout is not running, or is a node of a graph: the graph's run has the report then.
        """
        if self._drive is not None and self._doctor is not None:
            counters, learner = self._drive.run.counters, self._learner_meter
            report = counters.report()
            elapsed_ns, piece = int(report.elapsed_s * 1e9), self._slowest_learner_piece()
            part = node_report(elapsed_ns, learner, learner.read(), slowest_piece=piece)
            report = report.moved(CALLER, part, counters.reader_times.read())
            return report.with_parts("rollouts", self.environments.stages(report.elapsed_s))
        if self._is_in_graph:
            raise RunError(
                "the rollout is in a graph, whose run has the report: expected run.report(), of 'async with "
                "graph.run() as run'"
            )
        raise RunError(f"the rollout is not running, it is {self._state}: nothing to report")

    def diagnose(self) -> Diagnosis:
        """What it waits for right now, and whether that is a stall: fields, and a text by `str`. From any thread.

        As a node of a graph it is not running by itself: ask `run.diagnose()` then.
        """
        return Diagnosis("not running") if self._doctor is None else self._doctor.diagnose()

    def snapshot(self) -> dict[str, Any]:
        """What `rollflow top` shows of it, as plain values. From any thread; in a graph, its figures alone."""
        own = {"kind": type(self).__name__, "name": self.environments.describe(), "figures": self.log.figures()}
        return own if self._doctor is None or self._doctor.is_over else own | self._doctor.seen(self.report())

    def signs(self) -> Sequence[Sign]:
        """Silent faults: what flows, and can't be right. For the doctor's look alone, which has others looked at."""
        version = max(self.lag.versions().values(), default=0)
        found = self._rounds.checks.signs(version, self.environments.lanes_at_work)
        return *self.lag.signs(self._rounds.handed_steps), *found

    @property
    def num_steps(self) -> int:
        """Transitions that the environments have made, with those of an earlier run: see `load_state_dict`."""
        return self._steps_before + int(self.environments.num_steps)

    def state_dict(self) -> dict[str, Any]:
        """What the run has counted so far, for a checkpoint: steps, vector steps, rounds, policy versions by module.

        The weights, the optimizer's state and that of connector pieces are saved beside it.
        """
        counts = {"steps": self.num_steps, "vector_steps": self.environments.vector_steps, "rounds": self.log.rounds}
        return {**counts, "versions": dict(self.lag.versions())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Count on from where an earlier run was when `state_dict` gave this: before weights are published.

        `num_steps`, schedules, policy versions, the log's x axis and the facts of saved policies go on from there.
        Raises RunError once the rollout runs, or weights have been published, ValueError for anything but such a state.
        """
        if self._state != "new" or self.environments.is_started:
            raise RunError("the rollout has begun, expected load_state_dict before it runs")
        versions = state.get("versions") if isinstance(state, Mapping) else None
        if not isinstance(versions, Mapping):
            raise ValueError(f"state is {shown(state)}, expected what state_dict() of a rollout gave")
        counts = {name: state.get(name) for name in ("steps", "vector_steps", "rounds")} | dict(versions)
        if wrong := [name for name, count in counts.items() if not is_whole(count) or count < 0]:
            text = f"state has {shown(counts[wrong[0]])} under {wrong[0]!r}, expected whole numbers from 0 on"
            raise ValueError(text)
        self._acting.go_on_from(versions)
        self.environments.begin_at(int(state["vector_steps"]))
        self._steps_before = int(state["steps"])
        self.log.go_on_from(self._steps_before, int(state["rounds"]))

    @property
    def lost(self) -> dict[str, int]:
        """Transitions that were made and not handed out, by cause.

            closed         were under way when the rollout, or its graph's run, was left, cancelled or interrupted; or
                           left out with the last fragment of a lane that was set aside, for a reward that isn't finite
            failed         were under way when an error ended it
            undelivered    a `TrainerSink` had taken, and its trainer was not done with: of all sinks together, each
                           once; a sink's own are in its `lost["undelivered"]`
            max_lag        were too old
            workers        were being made in workers and on hosts that were lost: nobody knows whether they were made;
                           of whole rollouts also what had been reported and not sent
            dropped        an edge threw away that alone led on
            incomplete     belonged to episodes that had not ended when the rollout was left, with `complete_episodes`

        In a graph a fragment is under way until every sink has it, but for sinks behind an edge that drops.
        """
        environments, rounds = self.environments, self._rounds
        lost = Counter({"max_lag": self.lag.dropped_steps, "workers": environments.lost_steps}) + self._lost_before
        made = int(environments.num_steps) + environments.unrecorded_steps
        if self._ended_by is not None:
            lost["incomplete"] = rounds.incomplete_steps
            lost[self._ended_by] += made - rounds.handed_steps - self.lag.dropped_steps - lost["incomplete"]
        elif self._is_in_graph:
            lost += self.ledger.lost_of(made)
        return {cause: steps for cause, steps in lost.items() if steps}

    def evaluate_every(
        self,
        steps: int,
        *,
        env: Any = None,
        episodes: int = 20,
        best: str | Path | None = None,
        **options: Any,
    ) -> Evaluations:
        """Evaluate the newest weights each time so many environment steps were made, in a process beside the rollout.

            env, episodes, options    of `evaluate`; what is given is pickled for the other process
            best                      folder that has the policy with the highest mean return so far, as `save_policy`
                                      writes it; one of an earlier run counts. None: none is kept

        The rollout is never held up: an evaluation that is due while another is under way is late. Loops alone begin
        them, between two rounds. The log has `eval/return`, `eval/length` and `eval/version`; `done` of what is
        returned has them all. Raises ValueError for numbers below 1, RunError once it is closed, and PolicyError as
        `evaluate` does.
        """
        check_numbers(steps=(steps, 1), episodes=(episodes, 1))
        if self._state not in ("new", "running"):
            raise RunError(f"the rollout is {self._state}, expected evaluate_every() before its loop, or in it")

        def played() -> Played:
            play, policies, version = self._played(env, episodes, options)
            return play, {} if best is None else policies(Path(best)), version

        self._beside.append(Evaluations(steps, played, self.log))
        return self._beside[-1]

    @abc.abstractmethod
    def _played(self, env: Any, episodes: int, options: Mapping[str, Any]) -> tuple[Any, Any, Any]:
        """A call that plays with copies of the policies, a function of the path for those, and their versions."""

    # Checkpoints

    @classmethod
    def resume(cls, folder: str | os.PathLike[str], env: Any = None, **keywords: Any) -> Self:
        """A rollout that goes on from the newest checkpoint in a folder, or from the one that the folder is.

        env, keywords    as for a new one: those of the run that was saved, but for those given here. Callables, modules
                         and environments that were made are given again: a checkpoint can't have them

        Its modules, which are given or made, have the weights, and `attach` loads what was saved beside. Raises
        CheckpointError for what is no checkpoint, is damaged, or lacks what has to be given again.
        """
        path, state = read(folder)
        env, keywords = keywords_of(state, env, keywords)
        rollout = cls(env, **keywords)
        with closing_on_error(rollout.close):
            try:
                rollout.go_on_with(state)
            except Exception as error:  # of modules and pieces of any kind
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:400]
                raise CheckpointError(
                    f"{path} can't be gone on from: {reason}; expected the modules and pieces of the run that was saved"
                ) from error
        rollout._checkpoints.go_on_from(path, state["attached"])
        logger.info("the run goes on from %s", path)
        return rollout

    def attach(self, **objects: Any) -> None:
        """Save what these have learnt with the run: what has state_dict and load_state_dict, and replays.

        Optimizers, schedules, a `DatasetSource`; also what has get_state and set_state, as a `torch.Generator` has. Of
        a `Replay` each checkpoint has all rows, and writes those that are new. In a run that goes on with another one
        they load what was saved there under their names: before the loop. Raises ValueError for an object that can't be
        saved, and RunError for one that comes too late.
        """
        self._checkpoints.attach(objects)

    def save(self, folder: str | os.PathLike[str], *, keep: int = 1) -> Path:
        """Save the run as it stands, in the thread of its loop, for `resume`; the checkpoint's own folder in `folder`.

        keep    newest checkpoints that are kept there

        Lanes stop at their next step for as long as their state is copied. Raises RunError if it does not run, and
        CheckpointError for what can't be saved or written: what pieces keep with episodes, and infos, are to be plain
        values; and ValueError for a `keep` below 1.
        """
        return self._checkpoints.save(folder, keep)

    def _captured(self) -> tuple[State, int]:
        """The state of a run, in the thread of its loop, and the number of its transitions: all copies."""
        if self._is_in_graph or self._state != "running":
            stands = "in a graph" if self._is_in_graph else self._state
            raise RunError(f"the rollout is {stands}, expected save() while a loop over it runs, in the loop's thread")
        if get_ident() != self._checkpoints.thread:
            raise RunError("save() was called in another thread, expected that of the loop, between two rounds")
        assert self._drive is not None
        return self.capture(self._drive.standing_still)

    def capture(self, standing_still: Callable[[Callable[[Sequence[Any]], State]], State]) -> tuple[State, int]:
        """The state of a run, and the number of its transitions: all copies.

        standing_still    calls a function while every lane stands at the gate, with the fragments that were not taken

        Raises CheckpointError for lanes whose state can't be saved.
        """
        acting, environments, given = self._acting, self.environments, dict(self._given)

        def plain(fragment: F) -> State:
            return plain_fragment(fragment, environments.lanes[fragment.lane])

        def stand(waiting: Sequence[Any]) -> State:
            return {
                "acting": copied(acting.get_state()),
                "pipelines": {name: copied(pipeline.get_state()) for name, pipeline in self._saved_pipelines()},
                # First: whole rollouts elsewhere say those of their lanes with it, and others hold what was under way.
                "environments": environments.get_state(),
                "lanes": [state_of_lane(lane) for lane in environments.lanes],
                "vector_steps": environments.vector_steps,
                "first_step": environments.lanes[0].first_step,
                "credits": self._credits.get_state(),
                "waiting": [plain(each) for each in waiting if not isinstance(each, NoFragment)],
                "metrics": self.metrics.get_state(),
                "num_steps": self.num_steps,
                "generators": generators(),
            }

        check_lanes(environments.lanes)
        state = standing_still(stand)
        if given.get("seed") is None:
            given["seed"] = self.seed
        state |= {
            "layout": layout_of(environments),
            "keywords": kept_of(given),
            "pieces": {name: list(pipeline.names) for name, pipeline in self._saved_pipelines()},
            "returns": self.returns.get_state(),
            "rounds": self._rounds.get_state(plain),
            "open_episodes": copied(self._rounds.collector.get_state()),
            "log_rounds": self.log.rounds,
            "steps_before": self._steps_before,
            "lost_before": dict(self._lost_before + self.ledger.lost + Counter(workers=environments.lost_steps)),
            "cut_steps": self.ledger.cut_steps,
        }
        return state, state["num_steps"]

    def go_on_with(self, state: Mapping[str, Any], *, anew: bool = False) -> bool:
        """Go on from the state of another run, before this one begins; whether its environments do.

        anew    whether they begin anew; with other lanes than it had they do. It is logged
        """
        acting, environments = self._acting, self.environments

        def made(plain: Mapping[str, Any]) -> F:
            fragment: F = fragment_in(plain, environments.lanes[plain["lane"]])
            return fragment

        self._prepare_lanes()
        acting.set_state(state["acting"])
        for name, pipeline in self._saved_pipelines():
            before = state.get("pieces", {}).get(name, pipeline.names)
            for called, piece in zip(pipeline.names, pipeline, strict=True):
                if called not in before and type(piece).get_state is not ConnectorV2.get_state:
                    logger.warning("the run that was saved had no %s in %s: its state is as it was made", called, name)
            pipeline.set_state(state["pipelines"][name])
        self.metrics.set_state(state["metrics"])
        steps, self._lost_before = state["steps_before"], Counter(state["lost_before"])
        now, before = layout_of(environments), state["layout"]
        if not now["deterministic"]:
            before = {**before, "deterministic": False}  # lanes that kept order go on without it
        goes_on = now == before and not anew
        if goes_on:
            self.ledger.cut_steps = state["cut_steps"]
            environments.begin_at(state["first_step"])
            for lane, each in zip(environments.lanes, state["lanes"], strict=True):
                go_on(lane, each, acting)
            environments.go_on_from(state["environments"], state["credits"].get("order"))
            self._credits.set_state(state["credits"])
            self.returns.set_state(state["returns"])
            self._rounds.set_state(state["rounds"], made)
            self._rounds.collector.set_state(state["open_episodes"])
            self._waiting = [made(each) for each in state["waiting"]]
        else:
            handed, dropped = state["rounds"]["handed_steps"], state["rounds"]["dropped"][1]
            handed = state["cut_steps"] if self._is_in_graph else handed
            left_out = state["num_steps"] - steps - handed - dropped
            self._lost_before += Counter(max_lag=dropped, closed=left_out)
            steps = state["num_steps"]
            environments.begin_at(state["vector_steps"])
            self.returns.set_state(state["returns"], goes_on=False)
            other = [shown({name: of[name] for name in of if now[name] != before[name]}) for of in (now, before)]
            logger.warning(
                "the run goes on %s: weights, connectors, counts and what is attached are kept; environments begin "
                "anew, and what was under way is left out",
                "from a state before what has come of it" if anew else f"with {other[0]} where it had {other[1]}",
            )
        self._steps_before, self._is_restored, self._generators = steps, goes_on, state["generators"]
        self.log.go_on_from(steps, state["log_rounds"])
        self.log.is_made_again = True
        return goes_on

    def _saved_pipelines(self) -> list[tuple[str, Any]]:
        return [*self._acting.named_pipelines, *self._learner_pipelines().items()]

    # Functions that are called: one is given by a call, or by a decorator such as `@rollout.on_episode`. Several of one
    # kind are called in the order in which they came.

    def on_batch(self, function: C) -> C:
        """Call a function with every train batch of a loop over `batches()`, before the loop gets it."""
        return self.hooks.add("batch", function)

    def on_episode(self, function: C) -> C:
        """Call a function with each `FinishedEpisode`, before the loop gets the fragment, or the batch, that ends it.

        In a graph it is called as the fragment leaves the rollout.
        """
        return self.hooks.add("episode", function)

    def on_publish(self, function: C) -> C:
        """Call a function with each policy version that is published, in the thread that publishes it.

        Of several modules it gets a dict, module id -> version.
        """
        return self.hooks.add("publish", function)

    # Inside

    @contextmanager
    def _ending_on_error(self) -> Iterator[None]:
        """Close the environments if the rollout can't be entered: no block's end closes them then."""
        try:
            with closing_on_error(self.environments.close):
                yield
        except BaseException as error:
            self._end(error)
            raise

    def _iterator(self, made: Callable[[bool], Iterator[T]], completes: bool, progress: bool) -> RolloutIterator[T]:
        self._rounds.check_completes(completes)
        check_flags(progress=progress)
        if progress:
            self.log.add("progress:")
        return RolloutIterator(self, partial(made, completes))

    def _stop_doctor(self) -> None:
        if self._doctor is not None:
            self._doctor.stop()

    def _end(self, error: BaseException | None) -> None:
        self._stop_doctor()
        self._state, self._ended_by = "closed", cause_of(error)
        if error is not None and not isinstance(error, Exception):
            self._interrupted_by = type(error).__name__
        self._rounds.let_go()
        self._relay.take(())
        for evaluations in self._beside:
            evaluations.close()
        try:
            self.log.end()
            if self._options.schedule is not None:
                self._options.schedule.end(error)
        finally:
            self._checkpoints.end()

    def interrupt(self, error: BaseException) -> None:
        """End the run, which KeyboardInterrupt or the like has broken off, and note on it what is lost.

        Its traceback keeps the frames of the program, such as its environment's, and none of rollflow's.
        """
        self._interrupted_by = type(error).__name__
        self.__exit__(type(error), error, error.__traceback__)
        error.add_note(self._told_interrupt())
        error.__traceback__ = outside_of_rollflow(error.__traceback__)

    def _told_interrupt(self) -> str:
        lost, handed = self.lost, self._rounds.handed_steps
        causes = ", ".join(f"{steps:,} lost ({cause})" for cause, steps in lost.items()) or "none lost"
        return (
            f"the rollout was ended by {self._interrupted_by}: {handed + sum(lost.values()):,} transitions made "
            f"or under way, {handed:,} handed out, {causes}"
        )

    def next_round(self, *, is_first: bool) -> bool:
        """Have the next round of a loop ready to be handed out; False if no more fragments come."""
        rounds = self._rounds
        with self._asking(is_first, "with Rollout(...) as rollout: around it, or rollout.start()") as drive:
            for _ in rounds.missing(drive.release):
                with rounds.noting_failure():
                    fragment = drive.next()
                rounds.take(fragment, drive.release)
        return self._is_round_ready()

    async def next_round_async(self, *, is_first: bool) -> bool:
        """Have the next round ready, as `next_round` does, in an event loop."""
        rounds = self._rounds
        with self._asking(is_first, "async with Rollout(...) as rollout: around it", is_async=True) as drive:
            for _ in rounds.missing(drive.release):
                with rounds.noting_failure():
                    fragment = await drive.next_async()
                rounds.take(fragment, drive.release)
        return self._is_round_ready()

    @contextmanager
    def _asking(self, is_first: bool, expected: str, *, is_async: bool = False) -> Iterator[Driver]:
        """Block in which the reader asks the driver for its next round.

        Raises RunError if the rollout isn't entered as expected, or is closed, by another thread, meanwhile or before.
        """
        drive, doctor = self._drive, self._doctor
        is_entered = self._is_async is is_async and (not is_first or self._state == "running")
        if drive is None or doctor is None or not is_entered:
            raise self._not_entered(expected)
        doctor.reader_asks()
        closed = RunError(
            "the rollout is closed: close() was called while this loop ran; expected drain(), after which a loop ends "
            "by itself"
        )
        if self._state != "running":
            raise closed
        self._checkpoints.look()
        for evaluations in self._beside:
            evaluations.look(self.num_steps)
        if self._options.schedule is not None:
            self._options.schedule.flush()
        try:
            yield drive
        except Exception as error:
            if self._state != "running":
                raise closed from error
            raise
        if self._state != "running":
            raise closed

    def _is_round_ready(self) -> bool:
        self._warn_of_notes()
        if not (ready := self._rounds.ready):
            return False
        assert self._doctor is not None
        self._doctor.reader_gets(ready)
        self.log.rounds += 1
        return True

    def _not_entered(self, expected: str) -> RunError:
        """The error of a loop that expects the rollout to be entered in another way, or that it has not ended."""
        if self._interrupted_by:
            return RunError(
                f"{self._told_interrupt()}; expected a new one, Rollout(...), for another loop; it counts on from here "
                "by load_state_dict(rollout.state_dict())"
            ).see("interrupted")
        if self._state == "closed":
            return RunError("the rollout is closed; expected a new one, Rollout(...), for another loop")
        entered = "by 'async with'" if self._is_async else "by 'with' or start()"
        state = f"running, entered {entered}" if self._state == "running" else self._state
        return RunError(f"the rollout is {state}; this loop expects: {expected}")

    def _warn_of_notes(self) -> None:
        """Warn of lanes that were set aside since the last round."""
        notes = self.environments.report_notes[self._notes_told :]
        self._notes_told += len(notes)
        for note in notes:
            warn_caller(f"{note}; the others go on without it", RuntimeWarning)

    def _batches(self, complete_episodes: bool) -> Iterator[Batch]:
        """The batch of a round; none if all its fragments are too old, or have nothing to learn from."""
        # In the lanes' order, in whichever they came.
        taken = self._rounds.hand_out(complete_episodes)
        fragments = sorted(taken, key=lambda fragment: (fragment.lane, fragment.sequence))
        if not fragments:
            return
        try:
            with AtWork([self._learner_meter]):
                began = clock()
                batch = self._batch_of(fragments)
            self._learner_meter.calls.add(clock() - began)
        except BaseException:
            self._rounds.put_back(fragments)
            raise
        if batch:
            self._learner_meter.items += 1
            self.hooks.tell("batch", batch)
            yield batch


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
        """The node that sees the fragments in a graph, also if nothing is written: `snapshot()` has figures, too.

        Raises GraphError if the rollout is to write a trace: the graph's run does that.
        """
        if self._trace is not None:
            raise GraphError("trace is for a loop over the rollout, expected graph.run(trace=…) in a graph")
        return _LogNode(self, self._note, self._rollout)

    def hand_over_trace(self) -> str | os.PathLike[str] | None:
        """Leave the trace to whoever runs the graph, and return its file; None: none is to be written."""
        trace, self._trace = self._trace, None
        return trace

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
