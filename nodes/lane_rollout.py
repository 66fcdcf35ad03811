"""One lane's whole rollout apart from the others', in a process or on a host of its own."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rollflow.nodes.connectors.env_to_module.env_to_module_pipeline import EnvToModulePipeline
from rollflow.nodes.connectors.module_to_env.module_to_env_pipeline import ModuleToEnvPipeline
from rollflow.nodes.env_to_module import EnvToModule
from rollflow.nodes.environments import Environments
from rollflow.nodes.loaded_weights import LoadedWeights
from rollflow.nodes.metrics_logger import MetricsLogger
from rollflow.nodes.module_forward import ModuleForward
from rollflow.nodes.module_to_env import ModuleToEnv
from rollflow.nodes.policy_weights import PolicyWeights, Weights
from rollflow.nodes.ring import ring_of, seed_lane
from rollflow.nodes.stepping import Turn, nothing, step_of
from rollflow.stream.errors import RollflowError
from rollflow.stream.fragment import Fragment
from rollflow.stream.inline_run import InlineRun
from rollflow.stream.lane import Lane

# Lanes of one process do their first forward passes one after the other: where threads call a mathematical library for
# the first time together, one of them may get results of lower accuracy, and no two runs would be the same.
_first_passes = threading.Lock()
_BEAT_S = 0.1  # how often a lane that waits for another's first pass says that it does


class Drained(BaseException):
    """Raised by `between` where what there is of the fragment is wanted now; the turn after it goes on from there."""


@dataclass(frozen=True, slots=True)
class LanePlan:
    """What one lane's rollout is to be.

    lane, first_slot    its number, and that of its first slot, among all of the rollout's
    sequence            number of its first fragment
    fragment_length     vector steps in a fragment (T)
    lookback            steps of the fragment before in each (H)
    seed                of environments and sampling
    acting              how forward passes are done: what `ModuleForward` takes beside module and weights
    digests             whether weights are digested when they have been loaded
    """

    lane: int
    first_slot: int
    sequence: int
    fragment_length: int
    lookback: int
    seed: int
    acting: Mapping[str, Any]
    digests: bool


class Turned(NamedTuple):
    """What a turn gave.

    fragment      without rows where nothing was made
    error         what the environments raised; None: nothing. After it, the lane is of no use any more
    lost_steps    transitions that were under way then
    """

    fragment: Fragment
    error: Exception | None = None
    lost_steps: int = 0


class WeightsFrom(PolicyWeights):
    """Newly published weights, as they come between two forward passes.

    version    that the module's have
    between    called before every pass; it may `put` others, or raise
    digests    whether weights are digested when they have been loaded

    loaded     their digests; None: there are none
    """

    def __init__(self, module: Any, version: int, between: Callable[[], None], *, digests: bool) -> None:
        super().__init__(module, version)
        self.between = between
        self.loaded = LoadedWeights() if digests else None
        self._seen: int | None = None  # version of those that were digested

    def put(self, version: int, weights: Weights) -> None:
        """Have the next pass use these, unless newer ones are here already.

        Raises ModuleError when names or shapes are not those of the module.
        """
        self.check(weights)
        with self._lock:
            if version > self._version:
                self._version, self._unused = version, (version, dict(weights))

    def load_into(self, module: Any) -> int:
        """Have the module use the newest weights; the version that it then has."""
        version = super().load_into(module)
        if self.loaded is not None and version != self._seen:
            self._seen = version
            self.loaded.look_at(version, module)
        return version


class LaneRollout:
    """Environments, connectors and a module of one lane, which gives a fragment for every turn.

    env                             a vector environment, which whoever gives it closes
    plan                            what this is to be
    module, weights                 a copy of the module for this lane alone, and where others of its weights
                                    come from
    env_to_module, module_to_env    connector pipelines for this lane alone
    began                           called when the first reset and the first forward pass are done
    is_ours                         whether the vector environment was put together by us: see `step_of`
    is_shared                       whether other processes may look at the lane's columns
    hide                            called before rows that they may have seen are changed
    turn                            called when a reset within a step begins, and when it has ended: see `step_of`

    lane                            the lane
    """

    def __init__(
        self,
        env: Any,
        plan: LanePlan,
        *,
        module: Any,
        weights: WeightsFrom,
        env_to_module: EnvToModulePipeline,
        module_to_env: ModuleToEnvPipeline,
        began: Callable[[], None] = nothing,
        is_ours: bool = True,
        is_shared: bool = False,
        hide: Callable[[], None] = nothing,
        turn: Turn = nothing,
    ) -> None:
        self._hide = hide
        environments = _OneLane(
            env,
            is_ours=is_ours,
            is_shared=is_shared,
            turn=turn,
            fragment_length=plan.fragment_length,
            lookback=plan.lookback,
            seed=plan.seed,
            first_lane=plan.lane,
            first_slot=plan.first_slot,
        )
        self.lane: Lane
        [self.lane] = environments.lanes
        seed_lane(self.lane, plan.seed)
        self.lane.fragment.sequence = plan.sequence
        self._pipelines, self._weights = (env_to_module, module_to_env), weights
        self._metrics = MetricsLogger()
        self._turns = _Turns(weights.between)
        context = {"module": module, "explore": plan.acting["explore"], "metrics": self._metrics}
        forward = _FirstInTurn(module, weights, self._turns, began, **plan.acting)
        prepare = EnvToModule(env_to_module, **context)
        act = ModuleToEnv(module_to_env, threads=plan.acting["threads"], **context)
        self._run = InlineRun(ring_of(environments, prepare, forward, act, self._turns))
        self._run.__enter__()

    def turn(self) -> Turned:
        """Make the next fragment. Raises what the module or a connector raises."""
        self._turns.want()
        try:
            given = self._run.next_outputs()
        except Exception as error:
            if not is_of_environment(error):
                raise
            self._hide()
            lost = self.lane.lose(f"{type(error).__name__}: {error}")
            return Turned(self.lane.cut(), error, lost)
        # None where the gate has held the lane: it stands before its next forward pass.
        return Turned(given[0][1] if given else self.lane.cut())

    def take_states(self, states: Sequence[dict[str, Any]]) -> None:
        """Have the connectors go on from states that they have come to elsewhere: one for each of the two pipelines."""
        for pipeline, state in zip(self._pipelines, states, strict=True):
            pipeline.set_state(state)

    def told(self) -> dict[str, Any]:
        """What there is to say beside a fragment.

        steps      transitions made so far
        nodes      what every stage has counted: [name, items, busy seconds]
        states     of the pipelines' connectors; not there where none has any
        metrics    what was logged since this was asked last; not there where nothing was
        loaded     version and digest of the newest weights that are digested; not there where none are
        """
        told: dict[str, Any] = {"steps": self.lane.num_steps}
        told["nodes"] = [[node.name, node.items, node.busy_s] for node in self._run.report().nodes]
        states = [pipeline.get_state() for pipeline in self._pipelines]
        if any(states):
            told["states"] = states
        if self._metrics.keys():
            told["metrics"] = self._metrics.get_state()
            self._metrics.reset()
        if self._weights.loaded is not None and self._weights.loaded.newest is not None:
            told["loaded"] = list(self._weights.loaded.newest)
        return told


def is_of_environment(error: Exception) -> bool:
    """Whether it was an environment of a lane that raised, rather than the module, a connector, or what is ours."""
    return "in node 'env'" in getattr(error, "__notes__", ()) and not isinstance(error, RollflowError)


class _OneLane(Environments):
    """The environments of one lane, made already."""

    def __init__(self, env: Any, *, is_ours: bool, is_shared: bool, turn: Turn, **options: Any) -> None:
        self._are_ours, self._is_shared, self._turn = is_ours, is_shared, turn
        super().__init__(env, **options)

    def _lane(self, index: int, vector: Any) -> Lane:
        layout = self._layout(index, vector, self.seed)
        return Lane(index, layout, self.observation_space, is_shared=self._is_shared)

    def _made(self, env: Any, num_envs: int | None, lanes: int | None) -> Sequence[Any]:
        self._steps = [step_of(env, is_ours=self._are_ours, turn=self._turn)]
        return [env]


class _Turns:
    """A gate before the forward pass: lets the lane begin a fragment whenever one is wanted, and go on with it.

    between    raises Drained where it is to be held; it passes again once a fragment is wanted
    """

    def __init__(self, between: Callable[[], None]) -> None:
        self._between = between
        self._is_wanted = self._is_held = False
        self._is_first = True
        self._changed: Any = None

    def admits(self, lane: Lane) -> bool:
        """Whether the lane may take its next step; before the first one it waits until no other lane is at its own."""
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


class _FirstInTurn(ModuleForward):
    """Forward passes, before the first of which the gate has waited for those of other lanes."""

    def __init__(self, module: Any, weights: WeightsFrom, turns: _Turns, began: Callable[[], None], **how: Any) -> None:
        super().__init__(module, weights, **how)
        self._turns = turns
        self._began: Callable[[], None] | None = began

    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        """One pass with one version of the weights."""
        if self._began is None:
            return super().forward(batch)
        try:
            output = super().forward(batch)
        finally:
            self._turns.end_first()
        self._began()
        self._began = None
        return output
