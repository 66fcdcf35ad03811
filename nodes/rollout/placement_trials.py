"""Trials of places, each of which runs for a moment: those that may be about as fast, and what they cost."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from rollflow.nodes.rollout.options import EnvOptions, FlowOptions, ForwardOptions, PolicyOptions
from rollflow.nodes.rollout.placement_cost_model import PlacementChoice, PlacementRequest
from rollflow.nodes.rollout.placement_probe import generators_kept
from rollflow.nodes.rollout.simulation import Setting, simulate
from rollflow.nodes.rollout.step_costs import StepCosts
from rollflow.nodes.stages.connector_builders import copied_module, copied_pieces

logger = logging.getLogger(__name__)

_ROUNDS, _ROUND_S = 3, 0.2
_FRAGMENT_S = 0.05  # what a fragment is to take at most
_LONGEST_START_S = 5.0  # that environments may take to be made, those of all places
_SLOW_S = 0.1  # steps that take longer are not tried: what is expected of them is true enough
_LONG_S = 10e-3  # a lane's step beside which a hand-over is little
_LANES, _WORKERS = 4, 2  # that are run at most to see what a place costs
_HALVINGS = 14  # of the range in which a cost is looked for
# place -> its cost in `Machine`, and the range: seconds of a hand-over, or times as long as a vector step takes
_COSTS = {
    "inline": ("to_reader", 1e-6, 10e-3),
    "processes": ("to_process", 1e-6, 10e-3),
    "rollouts": ("in_worker", 0.5, 4.0),
}


def trial_of(
    rollout: type, policy: PolicyOptions, envs: EnvOptions, forward: ForwardOptions, flow: FlowOptions
) -> Callable[..., Any]:
    """Maker of rollouts with copies of the module and the pieces, to be tried where it might go fastest."""
    return partial(
        rollout,
        module=copied_module(policy.module),
        model_config=policy.model_config,
        lookback=flow.lookback,
        seed=envs.seed,
        explore=forward.explore,
        env_to_module_connector=copied_pieces(policy.env_to_module_connector),
        module_to_env_connector=copied_pieces(policy.module_to_env_connector),
        learner_connector=copied_pieces(policy.learner_connector),
        flat_forward=forward.flat,
        forward_threads=forward.threads,
        device=forward.device,
        autoreset_mode=envs.autoreset_mode,
        stall_after=None,
        **envs.timeouts,
    )


def trial_of_several(rollout: type, module: Any, connectors: Mapping[str, Any], **options: Any) -> Callable[..., Any]:
    """Maker of rollouts of several agents, with copies of the modules and the pieces; `options` are as given."""
    several = isinstance(module, Mapping)
    copies = {each: copied_module(one) for each, one in module.items()} if several else copied_module(module)
    pieces = {name: copied_pieces(connector) for name, connector in connectors.items()}
    return partial(rollout, module=copies, **pieces, **options)


class TrialResult(NamedTuple):
    """Rates of the places that ran, and failures.

    choices    those that ran, with the steps a second that they made
    failed     place -> why nothing could be made there
    """

    choices: list[PlacementChoice]
    failed: dict[str, str]


def is_worth_while(choices: Sequence[PlacementChoice], measured: StepCosts) -> bool:
    """True if there are several choices, whose environments are made and stepped in a moment."""
    if len(choices) < 2 or len(choices) * measured.slots * measured.start_s > _LONGEST_START_S:
        return False
    return all(_turn_s(choice, measured.slots) < _SLOW_S for choice in choices)


def race(
    choices: Sequence[PlacementChoice], make: Callable[..., Any], slots: int, request: PlacementRequest
) -> TrialResult:
    """Run the choices in turn, several times, and take medians. One that fails has another try, by itself.

    make    (where, lanes, workers, fragment_length) -> a Rollout of all slots, run as it is to be run
    """
    found, failed = _run(choices, make, slots, request)
    for choice in [choice for choice in choices if choice.where in failed]:
        alone, again = _run([choice], make, slots, request)  # what it needs may be there only once
        found += alone
        if not again:
            del failed[choice.where]
    places = [choice.where for choice in choices]
    return TrialResult(sorted(found, key=lambda choice: places.index(choice.where)), failed)


def _run(
    choices: Sequence[PlacementChoice], make: Callable[..., Any], slots: int, request: PlacementRequest
) -> TrialResult:
    runners: list[_Runner] = []
    failed: dict[str, str] = {}
    with ExitStack() as opened:
        for choice in choices:
            with _failing(choice, failed):
                length = _fragment_length(choice, slots, request)
                rollout = make(where=choice.where, lanes=choice.lanes, workers=choice.workers, fragment_length=length)
                opened.enter_context(_running(rollout))
                runners.append(_Runner(choice, rollout, length, request))
        for runner in _ROUNDS * runners:
            if runner.choice.where not in failed:
                with _failing(runner.choice, failed):
                    runner.run()
    return TrialResult([runner.found() for runner in runners if runner.choice.where not in failed], failed)


@contextmanager
def _running(rollout: Any) -> Iterator[None]:
    """Enter a rollout and leave it; an error in closing it is logged, for it says nothing of its speed."""
    rollout.__enter__()
    try:
        yield
    finally:
        try:
            rollout.__exit__(None, None, None)
        except Exception as error:
            logger.warning("closing what had been tried raised %s: %s", type(error).__name__, error)


@contextmanager
def _failing(choice: PlacementChoice, failed: dict[str, str]) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever an environment, a piece or a module may raise there
        failed[choice.where] = f"tried, it raised {type(error).__name__}: {error}"


class _Runner:
    """A rollout that makes fragments while they are taken, as many more as it may, and then stands still."""

    def __init__(self, choice: PlacementChoice, rollout: Any, length: int, request: PlacementRequest) -> None:
        self.choice = choice
        self._rates: list[float] = []
        environments, self._waiting = rollout.environments, request.prefetch + 1
        if request.makes_batches:  # each of a fragment from every lane
            self._taken = (environments.num_envs * length for _ in rollout.batches())
        else:
            self._taken = (fragment.num_steps for fragment in rollout.fragments())
            self._waiting *= environments.num_lanes
        next(self._taken)  # starts whatever there is to be started

    def run(self) -> None:
        for _ in range(self._waiting):
            next(self._taken)  # made while others ran
        steps, count, taken, began = 0, 0, 0.0, time.perf_counter()
        while taken < _ROUND_S:
            steps += next(self._taken)
            count += 1
            taken = time.perf_counter() - began
        self._rates.append(steps / taken)
        time.sleep(self._waiting * taken / count)  # it runs ahead once more

    def found(self) -> PlacementChoice:
        """The choice with the steps a second that it made."""
        return replace(self.choice, steps_per_s=median(self._rates))


def _fragment_length(choice: PlacementChoice, slots: int, request: PlacementRequest) -> int:
    """Vector steps in a fragment of a trial, which is to take a moment."""
    return max(1, min(request.fragment_length, int(_FRAGMENT_S / _turn_s(choice, slots))))


def _turn_s(choice: PlacementChoice, slots: int) -> float:
    """Seconds that a vector step of all slots is expected to take."""
    return slots / choice.steps_per_s


class TriedCosts:
    """Costs of places, by short runs of some lanes in as many workers, or two.

    Of steps in worker processes, what it takes to hand a lane over; of whole rollouts there, how much longer a vector
    step takes; and of a rollout that goes on in a thread while its reader works, what a fragment takes of the
    interpreter lock. Where steps are short, most of it is none of our work: when the system lets a thread go on and on
    which core, and caches that others have used meanwhile. No constant has that, and it differs with the steps.

    env           what a rollout was given
    make_trial    gives what makes rollouts with copies of its module and connectors
    """

    def __init__(self, env: Any, make_trial: Callable[[], Callable[..., Any]]) -> None:
        self._env, self._make_trial = env, make_trial
        self._found: dict[tuple[Setting, bool], float | None] = {}  # by what was run, and whether with batches

    def measured(self, costs: StepCosts, setting: Setting) -> StepCosts:
        """The costs, with that which a short run in the setting's place gives, where it is of any weight."""
        slots = -(-setting.slots // setting.lanes)
        if setting.where not in _COSTS or costs.env(slots) + costs.rest(slots) > _LONG_S:
            return costs
        if setting.where == "inline" and not setting.prefetch:
            return costs
        lanes, workers = min(_LANES, setting.lanes), min(_WORKERS, setting.workers)
        tried = replace(setting, slots=lanes * slots, lanes=lanes, workers=workers, hosts=0)
        # What of the reader's work holds the interpreter lock is the making of batches.
        batch_s = costs.update_s * (1 - costs.update_releases) if setting.where == "inline" else 0.0
        if (key := (tried, batch_s > 0)) not in self._found:
            with_batches = replace(costs, update_s=batch_s, update_releases=0.0)
            self._found[key] = self._tried(with_batches, tried, makes_batches=batch_s > 0)
        found = self._found[key]
        return costs if found is None else _with_cost(costs, setting.where, found)

    def _tried(self, costs: StepCosts, setting: Setting, *, makes_batches: bool) -> float | None:
        """The cost with which a simulation is as fast as a run; None: it can't be run for a moment."""
        slots = setting.slots
        if slots * costs.start_s > _LONGEST_START_S:
            return None
        env = self._env[:slots] if isinstance(self._env, list | tuple) else self._env
        workers = setting.workers if setting.has_workers else None
        choice = PlacementChoice(setting.where, setting.lanes, workers, _rate(costs, setting))
        request = PlacementRequest(
            prefetch=setting.prefetch, fragment_length=setting.fragment_length, makes_batches=makes_batches
        )
        with generators_kept():
            options = {"num_envs": slots, "prefetch": setting.prefetch, "max_batch": setting.max_batch}
            make = partial(self._make_trial(), env, **options)
            made, _ = race([choice], make, slots, request)
        if not made:
            return None
        ran = replace(setting, fragment_length=_fragment_length(choice, slots, request))
        _, least, most = _COSTS[setting.where]
        for _ in range(_HALVINGS):
            between = (least * most) ** 0.5
            is_faster = _rate(_with_cost(costs, setting.where, between), ran) > made[0].steps_per_s
            least, most = (between, most) if is_faster else (least, between)
        return least


def _with_cost(costs: StepCosts, where: str, cost: float) -> StepCosts:
    changes: dict[str, Any] = {_COSTS[where][0]: cost}
    return replace(costs, machine=replace(costs.machine, **changes))


def _rate(costs: StepCosts, setting: Setting) -> float:
    return simulate(costs, setting, costs.on(costs.machine.cores, setting.where)).steps_per_s
