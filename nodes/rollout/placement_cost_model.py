"""Cost model: the place where a rollout goes fastest, by what its parts take and what its user asks for."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollflow.nodes.metrics.metrics_logger import MetricsLogger
from rollflow.nodes.rollout.options import JOINT_PASSES

# On a machine of today: what a lane takes to come back from a thread or process, what a fragment takes to come from
# another process, and the part that is left to workers, beside the one who reads their fragments.
_HAND_OVER_S, _FRAGMENT_S, _KEPT = 150e-6, 500e-6, 0.88
WORTH_EXPECTED, WORTH_MADE = 1.1, 1.05  # how much faster than inline another place must be, and be seen to be
_AS_GOOD = 0.97  # of the fastest: the simpler place is taken
_CLOSE = 0.6  # of the fastest: too close to it for a choice without a try


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """Options that a place has to keep to: see `Rollout`."""

    lanes: int | None = None
    workers: int | None = None
    max_batch: int | None = None
    forward_in_thread: bool = False
    max_wait: float = 0.0
    prefetch: int = 0
    fragment_length: int = 128
    metrics: Any = None
    device: Any = None


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Costs of the parts of a vector step, in seconds.

    slots    in all
    env      a step of so many environments, in one thread: slots -> seconds
    waits    the share of that in which the processor is free
    rest     connectors, forward pass and recording, of so many slots: slots -> seconds
    start_s  for one environment to be made and to be reset for the first time
    """

    slots: int
    env: Callable[[int], float]
    waits: float
    rest: Callable[[int], float]
    start_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PlacementChoice:
    """A place, its lanes and workers, and the steps a second to be expected there."""

    where: Any
    lanes: int | None
    workers: int | None
    steps_per_s: float

    def __str__(self) -> str:
        lanes = [] if self.lanes is None else [f"{self.lanes} lane{'s' * (self.lanes > 1)}"]
        workers = [] if self.workers is None else [f"{self.workers} worker{'s' * (self.workers > 1)}"]
        numbers = ", ".join([*lanes, *workers])
        return f"{self.where} ({numbers})" if numbers else str(self.where)


def expected(
    measured: StepCosts, request: PlacementRequest, cores: int, ruled_out: Mapping[str, str]
) -> list[PlacementChoice]:
    """The best choice of each place that is not ruled out, the simplest place first.

    ruled_out    place -> why it can't be
    """
    places = {"inline": _inline, "threads": _threads, "processes": _processes, "rollouts": _rollouts}
    choices = []
    for where, candidates in places.items():
        made = list(candidates(measured, request, cores)) if where not in ruled_out else []
        if made:
            choices.append(max(made, key=lambda choice: choice.steps_per_s))
    return choices


def close(choices: Sequence[PlacementChoice]) -> list[PlacementChoice]:
    """The choices of which any may be the fastest, within the model's error."""
    most = max(choice.steps_per_s for choice in choices)
    return [choice for choice in choices if choice.steps_per_s >= _CLOSE * most]


def fastest(choices: Sequence[PlacementChoice], worth: float = WORTH_EXPECTED) -> PlacementChoice:
    """The fastest of choices with the simplest place first, or a simpler one that is as good.

    worth    how much faster than inline another place must be
    """
    most = max(choice.steps_per_s for choice in choices)
    best = next(choice for choice in choices if choice.steps_per_s >= _AS_GOOD * most)
    first = choices[0]
    return first if first.where == "inline" and best.steps_per_s < worth * first.steps_per_s else best


def refusals(request: PlacementRequest) -> dict[str, str]:
    """Place -> why it would not keep to the request."""
    if request.max_batch is not None or request.max_wait > 0 or request.forward_in_thread:
        return {"rollouts": JOINT_PASSES}
    if not isinstance(request.metrics, MetricsLogger | None):
        return {"rollouts": f"metrics of type {type(request.metrics).__name__} can't be merged"}
    return {}


def _inline(measured: StepCosts, request: PlacementRequest, cores: int) -> Iterator[PlacementChoice]:
    lanes = request.lanes
    if lanes is None and request.max_batch is not None and request.max_batch < measured.slots:
        lanes = _parts(measured.slots, request.max_batch)  # a lane's slots go together
    each = _parts(measured.slots, lanes or 1)
    yield PlacementChoice("inline", lanes, None, measured.slots / ((lanes or 1) * _turn(measured, each)))


def _threads(measured: StepCosts, request: PlacementRequest, cores: int) -> Iterator[PlacementChoice]:
    """A thread for each lane: as long as environments wait, others go on."""
    for lanes in _lanes(measured, request):
        each = _parts(measured.slots, lanes)
        rest = measured.rest(each) + _HAND_OVER_S
        working = lanes * (measured.env(each) * (1 - measured.waits) + rest)
        yield PlacementChoice("threads", lanes, None, measured.slots / max(working, measured.env(each) + rest))


def _processes(measured: StepCosts, request: PlacementRequest, cores: int) -> Iterator[PlacementChoice]:
    """Environments on the other cores, all else on this one."""
    for lanes in _lanes(measured, request):
        each, workers = _parts(measured.slots, lanes), min(lanes, request.workers or max(1, cores - 1))
        env, rest = measured.env(each), measured.rest(each) + _HAND_OVER_S
        working = env * (1 - measured.waits)
        busiest = max(_parts(lanes, workers) * working, lanes * rest, lanes * (working + rest) / cores)
        yield PlacementChoice("processes", lanes, workers, measured.slots / max(busiest, env + rest))


def _rollouts(measured: StepCosts, request: PlacementRequest, cores: int) -> Iterator[PlacementChoice]:
    """Whole rollouts on every core, beside the reader; several lanes of one worker have a thread each."""
    workers = min(measured.slots, request.lanes or measured.slots, request.workers or cores)
    for lanes in [workers, *_lanes(measured, request)]:
        if lanes < workers or request.lanes not in (None, lanes):
            continue
        each, together = _parts(measured.slots, lanes), _parts(lanes, workers)
        turn = _turn(measured, each) + _FRAGMENT_S / request.fragment_length
        working = together * (turn - measured.env(each) * measured.waits) * max(1.0, workers / cores)
        yield PlacementChoice("rollouts", lanes, workers, _KEPT * measured.slots / max(working, turn))


def _turn(measured: StepCosts, slots: int) -> float:
    """Seconds of a vector step of one lane, one thing after the other."""
    return measured.env(slots) + measured.rest(slots)


def _lanes(measured: StepCosts, request: PlacementRequest) -> list[int]:
    """Numbers of lanes worth a try: lanes of one size, and none too large for a forward pass."""
    slots = measured.slots
    if request.lanes is not None:
        return [request.lanes]
    even = [lanes for lanes in range(2, slots + 1) if slots % lanes == 0]
    return [lanes for lanes in even if request.max_batch is None or slots // lanes <= request.max_batch]


def _parts(count: int, size: int) -> int:
    return -(-count // size)


def explanation(
    best: PlacementChoice,
    measured: StepCosts,
    rates: Mapping[str, Sequence[PlacementChoice]],
    request: PlacementRequest,
    ruled_out: Mapping[str, str],
) -> str:
    """Reasons for a choice, for `explain()`.

    rates        kind of the steps a second, expected or made -> choices that have them
    ruled_out    place -> why it can't be
    """
    env, rest = measured.env(measured.slots) * 1e6, measured.rest(measured.slots) * 1e6
    parts = [
        f"where='{best.where}': a step of {measured.slots} environments takes {env:.0f} µs ({measured.waits:.0%} of it "
        f"waiting), all else of a vector step {rest:.0f} µs"
    ]
    for how, choices in rates.items():
        parts.append(f"{how}: " + (", ".join(f"{choice} {choice.steps_per_s:,.0f}" for choice in choices) or "none"))
    if request.workers is not None and best.workers is None:
        parts.append(f"workers={request.workers} is not used")
    parts += [f"not where='{where}': {why}" for where, why in ruled_out.items()]
    return "; ".join(parts)
