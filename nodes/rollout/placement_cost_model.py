"""Cost model: the place where a rollout goes fastest, by what its parts take and what its user asks for."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollflow.nodes.metrics.metrics_logger import MetricsLogger
from rollflow.nodes.rollout.options import JOINT_PASSES
from rollflow.nodes.rollout.simulation import Setting, simulate
from rollflow.nodes.rollout.step_costs import StepCosts

PLACES = ("inline", "threads", "processes", "rollouts")  # the simplest first
WORTH_EXPECTED, WORTH_MADE = 1.1, 1.05  # how much faster than inline another place must be, and be seen to be
_AS_GOOD_EXPECTED, _AS_GOOD_MADE = 0.88, 0.97  # of the fastest: the simpler place is taken
_CLOSE = 0.6  # of the fastest: too close to it for a choice without a try
_STEPS = 64  # of lanes, in a round that is simulated: there are many candidates
_MOST_LANES = 1024  # that are tried where fewer can be
_MORE = 1.01  # times as fast more lanes must be, to be better than fewer
_PAST_IT, _FAR = 0.75, 4  # of the fastest, and times its lanes: still more lanes would be slower yet, or no faster


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """Options that a place has to keep to: see `Rollout`.

    makes_batches    whether the reader makes train batches of the fragments
    """

    lanes: int | None = None
    workers: int | None = None
    max_batch: int | None = None
    forward_in_thread: bool = False
    max_wait: float = 0.0
    prefetch: int = 0
    fragment_length: int = 128
    metrics: Any = None
    device: Any = None
    makes_batches: bool = False


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
    choices = []
    for where in PLACES:
        if where not in ruled_out:
            found = best_setting(measured, measured.slots, where, request, cores)
            choices += [_choice(*found, request.lanes)] if found else []
    return choices


def _choice(setting: Setting, steps_per_s: float, asked_lanes: int | None) -> PlacementChoice:
    lanes = asked_lanes if setting.where == "inline" and setting.lanes == 1 else setting.lanes
    return PlacementChoice(setting.where, lanes, setting.workers if setting.has_workers else None, steps_per_s)


def best_setting(
    measured: StepCosts, slots: int, where: str, request: PlacementRequest, cores: int
) -> tuple[Setting, float] | None:
    """The fastest setting of a place that keeps to the request, with its steps per second; None: there is none.

    Once each worker has a lane, more are tried as long as they don't make it much slower, or are of use now and then.
    """
    best: tuple[Setting, float] | None = None
    for setting in settings(slots, where, request, cores):
        rate = _rate(measured, setting, cores)
        if best is None or rate > _MORE * best[1]:
            best = setting, rate
        elif setting.lanes > setting.workers and (rate < _PAST_IT * best[1] or setting.lanes >= _FAR * best[0].lanes):
            break
    return best


def _rate(measured: StepCosts, setting: Setting, cores: int) -> float:
    """Steps per second of a setting, by a short simulation: fragments are short, and lanes may run ahead therefore."""
    ahead = replace(setting, prefetch=max(1, setting.prefetch))
    return simulate(measured, ahead, measured.on(cores, setting.where), steps=_STEPS).steps_per_s


def close(choices: Sequence[PlacementChoice]) -> list[PlacementChoice]:
    """The choices of which any may be the fastest, within the model's error."""
    most = max(choice.steps_per_s for choice in choices)
    return [choice for choice in choices if choice.steps_per_s >= _CLOSE * most]


def fastest(choices: Sequence[PlacementChoice], worth: float = WORTH_EXPECTED) -> PlacementChoice:
    """The fastest of choices with the simplest place first, or a simpler one that is as good.

    worth    how much faster than inline another place must be: `WORTH_EXPECTED` or `WORTH_MADE`
    """
    most = max(choice.steps_per_s for choice in choices)
    as_good = _AS_GOOD_EXPECTED if worth == WORTH_EXPECTED else _AS_GOOD_MADE
    best = next(choice for choice in choices if choice.steps_per_s >= as_good * most)
    first = choices[0]
    return first if first.where == "inline" and best.steps_per_s < worth * first.steps_per_s else best


def refusals(request: PlacementRequest) -> dict[str, str]:
    """Place -> why it would not keep to the request."""
    if request.max_batch is not None or request.max_wait > 0 or request.forward_in_thread:
        return {"rollouts": JOINT_PASSES}
    if not isinstance(request.metrics, MetricsLogger | None):
        return {"rollouts": f"metrics of type {type(request.metrics).__name__} can't be merged"}
    return {}


def settings(slots: int, where: str, request: PlacementRequest, cores: int) -> Iterator[Setting]:
    """Settings of a place that are worth a try, and keep to the request, those with the fewest lanes first."""
    options: Any = {"where": where, "slots": slots, "prefetch": request.prefetch, "max_batch": request.max_batch}
    options["fragment_length"] = request.fragment_length
    if where == "inline":
        lanes = request.lanes
        if lanes is None and request.max_batch is not None and request.max_batch < slots:
            lanes = _parts(slots, request.max_batch)  # a lane's slots go together
        yield Setting(lanes=lanes or 1, **options)
        return
    workers = request.workers or (max(1, cores - 1) if where == "processes" else cores)
    least = min(slots, request.lanes or slots, workers) if where == "rollouts" else 1
    for lanes in sorted({*([least] if where == "rollouts" else []), *_lanes(slots, request, workers)}):
        if lanes >= least and request.lanes in (None, lanes):
            yield Setting(lanes=lanes, workers=min(lanes, workers), **options)


def _lanes(slots: int, request: PlacementRequest, workers: int) -> set[int]:
    """Numbers of lanes worth a try: as many as workers, and halves and doubles of that, or what is next to them.

    Lanes are of one size, and none is too large for a forward pass.
    """
    if request.lanes is not None:
        return {request.lanes}
    most_slots = request.max_batch or slots
    even = [lanes for lanes in range(2, slots + 1) if slots % lanes == 0 and slots // lanes <= most_slots]
    even = [lanes for lanes in even if lanes <= _MOST_LANES] or even[:1]
    halves = {workers >> power for power in range(workers.bit_length())}
    doubles = {workers << power for power in range(slots.bit_length())}
    return {
        lanes
        for wanted in halves | doubles
        for lanes in even[max(0, bisect_right(even, wanted) - 1) : bisect_left(even, wanted) + 1]
    }


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
