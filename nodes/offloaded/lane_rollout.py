"""One lane's whole rollout apart from the others', in a process or on a host of its own: its plan, and what acts."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollflow.nodes.connectors.env_to_module.observation_pieces import MeanStdFilter
from rollflow.nodes.connectors.pipelines.connector_pipeline_v2 import pieces_within
from rollflow.nodes.env.environments import ONE_AGENT, SEVERAL_AGENTS
from rollflow.nodes.env.lane_source import LaneSource
from rollflow.nodes.env.observation_check import Deviations
from rollflow.nodes.env.stepping import nothing
from rollflow.nodes.env.workers.lane_status import RaisedError
from rollflow.nodes.metrics.metrics_logger import MetricsLogger
from rollflow.nodes.modules.policy_weights import Weights
from rollflow.nodes.offloaded.lane_state import go_on, state_of_lane
from rollflow.nodes.policies.part_records import packed, unpacked
from rollflow.nodes.stages.acting import Acting
from rollflow.nodes.stages.module_set import AgentsActing
from rollflow.nodes.stages.ring import ring_of
from rollflow.stream.data.errors import CheckpointError, PolicyError, RollflowError
from rollflow.stream.data.stored_files import StoredKind
from rollflow.stream.graph.chain import CallMark
from rollflow.stream.graph.inline_run import InlineRun
from rollflow.stream.graph.meter import clock

AnyActing = Acting | AgentsActing
Published = Mapping[Any, tuple[int, Weights]]  # module id -> version and weights; of one module, DEFAULT_MODULE_ID

# Lanes of one process do their first forward passes one after the other: where threads call a mathematical library for
# the first time together, one of them may get results of lower accuracy, and no two runs would be the same.
_first_passes = threading.Lock()
_STATE = StoredKind("rollflow rollout", 1, "rollout.json", "the state of a rollout", CheckpointError)
_CALLS_NS = 1_000_000_000  # from one look at the times of calls to the next
_BEAT_S = 0.1  # how often a lane that waits for another's first pass says that it does


@dataclass(frozen=True, slots=True)
class LanePlan:
    """Plan of one lane's rollout.

    environments    keywords of the node that steps its environments: see `LaneSource`
    sequence        number of its first fragment
    first_step      the run's vector step at which it begins
    lookback        steps of the fragment before in each (H)
    how             forward passes are done: what `ModuleForward` takes beside module and weights
    versions        module id -> policy version of the weights that its copy has; -1: they are yet to come
    is_shared       whether other processes may look at the lane's columns
    name            that its pieces count under, in every process that does this rollout; "": none of before
    state           that it goes on from, as `LaneRollout.get_state` gave it; None: it begins
    records         whether steps of environments whose state can't be read are recorded
    """

    environments: Mapping[str, Any]
    sequence: int
    first_step: int
    lookback: int
    how: Mapping[str, Any]
    versions: Mapping[Any, int]
    is_shared: bool = False
    name: str = ""
    state: Mapping[str, Any] | None = None
    records: bool = False


def loaded_versions(acting: AnyActing) -> dict[Any, int]:
    """Have copies that act take over their newest weights: module id -> policy version that each then has."""
    return {module_id: weights.load_into(module) for module_id, (module, weights) in acting.by_id.items()}


class _OneLane(LaneSource):
    """The environments of one lane, made already.

    anew    why they could not go on from their states; "": they could, or were not to
    """

    anew = ""

    def begin_anew(self, lane: Any, reason: str) -> None:
        self.anew = reason
        lane.begin_anew(f"the run was resumed: {reason}")

    def _made(self, env: Any, num_envs: int | None, lanes: int | None) -> Sequence[Any]:
        self._here = [env]
        return self.kind.envs_of(self._here)


class Drained(BaseException):
    """Raised by `between` if what there is of the fragment is wanted now; the turn after it goes on from there."""


class LaneRollout:
    """Environments, connectors and modules of one lane, which gives a fragment for every turn.

    env         a `LaneVectorEnv` or `LaneEnvs`, which whoever made it closes
    plan        what this is to be
    acting      copies of modules and pipelines, for this lane alone
    deviations  of what the environments give, for whoever gets the fragments
    between     called before every forward pass; it may `put` weights, or raise
    began       called when the first reset and the first forward pass are done
    mark        where is noted what is under way; None: nobody looks at it

    lane        the lane
    """

    def __init__(
        self,
        env: Any,
        plan: LanePlan,
        acting: AnyActing,
        *,
        deviations: Deviations,
        between: Callable[[], None],
        began: Callable[[], None] = nothing,
        mark: CallMark | None = None,
    ) -> None:
        self._acting, self._deviations = acting, deviations
        self._metrics = MetricsLogger()
        self._turns = _Turns(between)
        for module_id, (_, weights) in acting.by_id.items():
            weights.go_on_from(plan.versions[module_id])
        has_one = isinstance(acting, Acting)
        self._environments = environments = _OneLane(
            env, kind=ONE_AGENT if has_one else SEVERAL_AGENTS, **plan.environments
        )
        if plan.records:
            environments.record_actions()
        if plan.is_shared:
            environments.share()
        environments.begin_at(plan.first_step if plan.state is None else plan.state["first_step"])
        environments.set_chosen_spaces(acting.chosen_spaces())
        acting.make_lanes(environments, plan.lookback, plan.environments["seed"], plan.sequence)
        [self.lane] = environments.lanes
        if plan.name:
            self._count_as(plan.name)
        if (state := plan.state) is not None:
            before = unpacked(_STATE, bytes(state["rollout"]), "the state of a rollout")
            go_on(self.lane, before["lane"], acting)
            environments.go_on_from([state["environments"]], None)
            self.take_states(before["pipelines"])
        self._where = f"lane {self.lane.index}, " if has_one else ""
        self._prepare, forward, act = acting.stages(environments, plan.how, self._metrics)
        first = _first_noted(forward, self._turns.end_first, began)
        self._run = InlineRun(ring_of(environments, self._prepare, first, act, self._turns), mark=mark)
        self._calls: dict[str, list[Any]] = {}
        self._calls_due = 0
        self._run.__enter__()

    def turn(self) -> tuple[Any, dict[str, Any], Exception | None]:
        """Make the next fragment; also the report that goes with it, and what the environments raised.

        The fragment has no rows where nothing was made. After an error the lane is of no use any more. Raises what the
        module or a connector raises, and EnvError for what the environments gave.
        """
        self._turns.want()
        raised: Exception | None = None
        lost = 0
        try:
            given = self._run.next_outputs()
        except Exception as error:
            if not is_of_environment(error):
                raise
            raised, given = error, []
            lost = self.lane.lose(f"{type(error).__name__}: {error}")
        # None where the gate has held the lane: it stands before its next forward pass.
        fragment = given[0][1] if given else self._prepare.cut(self.lane)
        report = self._report()
        if raised is not None:
            report |= {"failure": RaisedError.of(raised)._asdict(), "lost_steps": lost}
        return fragment, report, raised

    def put(self, published: Published) -> None:
        """Have the next pass use weights, unless newer ones are here. Raises ModuleError for those of others."""
        for module_id, (version, weights) in published.items():
            self._acting.by_id[module_id][1].publish_as(version, weights, copies=False)

    @property
    def under_way(self) -> int:
        """Transitions that the next vector step may end."""
        return self._acting.under_way(self.lane)

    def take_states(self, states: Iterable[dict[str, Any]]) -> None:
        """Have the connectors go on from states that they have come to elsewhere: one for each pipeline."""
        for (_, pipeline), state in zip(self._acting.named_pipelines, states, strict=True):
            pipeline.set_state(state)

    def get_state(self) -> dict[str, Any]:
        """The state of the environments, and of all else packed, between two turns; the lane's first step, its count.

        Raises CheckpointError for what has no plain form.
        """
        [environments] = self._environments.get_state()
        pipelines = [pipeline.get_state() for _, pipeline in self._acting.named_pipelines]
        try:
            rollout = packed({"lane": state_of_lane(self.lane), "pipelines": pipelines})
        except PolicyError as error:
            raise CheckpointError(f"the run can't be saved: {error}") from None
        counts = {"first_step": self.lane.first_step, "reported": self.lane.num_steps}
        return {"environments": environments, "rollout": np.frombuffer(rollout, np.uint8), **counts}

    def _count_as(self, name: str) -> None:
        for _, pipeline in self._acting.named_pipelines:
            for piece in pieces_within(pipeline):
                if isinstance(piece, MeanStdFilter):
                    piece.count_as(name)

    def busy_ns(self) -> list[int]:
        """For how long each of its `STAGES` has been busy, calls under way left out."""
        return [meter.busy_ns for meter in self._run.counters.nodes.values()]

    def _report(self) -> dict[str, Any]:
        """Report that goes with a fragment.

        steps         transitions made so far
        nodes         what every stage has counted, see `_nodes`
        states        of the pipelines' connectors; not there if none has any
        metrics       what was logged since this was asked last; not there if nothing was
        anew          why the environments could not go on from their states; not there if they could, or were not to
        deviations    (kind, text) of observations that were not in their space; not there if there are none
        failure       what the environments raised, as a `RaisedError` has it; not there if they did not
        lost_steps    the transitions that were under way then
        """
        report: dict[str, Any] = {"steps": self.lane.num_steps, "nodes": self._nodes()}
        states = [pipeline.get_state() for _, pipeline in self._acting.named_pipelines]
        if any(states):
            report["states"] = states
        if self._metrics.keys():
            report["metrics"] = self._metrics.get_state()
            self._metrics.reset()
        if self._environments.anew:
            report["anew"], self._environments.anew = self._environments.anew, ""
        if self._deviations.unsent:
            report["deviations"] = [[kind, self._where + text] for kind, text in self._deviations.take()]
        return report

    def _nodes(self) -> list[list[Any]]:
        """Of each stage [name, items, busy seconds, and of its calls, as of the last second: p50, p99, longest, piece].

        Before a stage's first call it has the first three.
        """
        if (now := clock()) >= self._calls_due:
            self._calls_due, pieces = now + _CALLS_NS, self._run.graph.slowest_pieces()
            stats = {meter.name: meter.calls.read() for meter in self._run.counters.nodes.values()}
            self._calls = {name: [*each, pieces.get(name, "")] for name, each in stats.items() if each is not None}
        return [
            [meter.name, meter.items, meter.read()[0] / 1e9, *self._calls.get(meter.name, ())]
            for meter in self._run.counters.nodes.values()
        ]


def is_of_environment(error: Exception) -> bool:
    """True if an environment of a lane raised, rather than the module, a connector, or this package."""
    return "in node 'env'" in getattr(error, "__notes__", ()) and not isinstance(error, RollflowError)


def _first_noted(
    forward: Callable[[Any], Any], ended: Callable[[], None], began: Callable[[], None]
) -> Callable[[Any], Any]:
    """The node of forward passes, which reports the first.

    ended    called once it has ended, also if it raises
    began    called once it is done
    """
    is_first = True

    def passed(batches: Any) -> Any:
        nonlocal is_first
        if not is_first:
            return forward(batches)
        try:
            output = forward(batches)
        finally:
            ended()
        began()
        is_first = False
        return output

    return passed


class _Turns:
    """A gate before the forward pass: lets the lane begin a fragment whenever one is wanted, and go on with it.

    between    raises Drained if it is to be held; it passes again once a fragment is wanted
    """

    def __init__(self, between: Callable[[], None]) -> None:
        self._between = between
        self._is_wanted = self._is_held = False
        self._is_first = True
        self._changed: Any = None

    def admits(self, lane: Any) -> bool:
        """True if the lane may take its next step; before the first one it waits until no other lane is at its own."""
        if self._is_held or (lane.at_start and not self._is_wanted):
            return False
        try:
            self._between()
            while self._is_first and not _first_passes.acquire(timeout=_BEAT_S):
                self._between()
        except Drained:
            self._is_held = True  # also where the run asks once more in this turn
            return False
        self._is_wanted = self._is_first = False
        return True

    def watch(self, changed: Any) -> None:
        """Take the function to be called when a fragment is wanted."""
        self._changed = changed

    def want(self) -> None:
        """A fragment is wanted."""
        self._is_wanted, self._is_held = True, False
        self._changed()

    def end_first(self) -> None:
        """The lane has taken its first step: others may."""
        _first_passes.release()
