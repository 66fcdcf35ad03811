"""Where a rollout is to go fastest, worked out from what its parts take and from what was asked for."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollflow.nodes.metrics_logger import MetricsLogger

# On a machine of today: what a lane takes to come back from a thread or process, what a fragment takes to come from
# another process, and the part that is left to workers, beside the one who reads their fragments.
_HAND_OVER_S, _FRAGMENT_S, _KEPT = 150e-6, 500e-6, 0.88
WORTH_EXPECTED, WORTH_MADE = 1.1, 1.05  # how much faster than inline another place must be, and be seen to be
_AS_GOOD = 0.97  # of the fastest: the simpler place is taken
_CLOSE = 0.6  # of the fastest: not to be told from it without a try


@dataclass(frozen=True, slots=True)
class Asked:
    """What was asked for, which stays as it is: see `Rollout`."""

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
class Measured:
    """What the parts of a vector step take, in seconds.

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
class Choice:
    """Where to go, with how many lanes and workers, and how many steps a second are to be expected."""

    where: Any
    lanes: int | None
    workers: int | None
    steps_per_s: float

    def __str__(self) -> str:
        lanes = [] if self.lanes is None else [f"{self.lanes} lane{'s' * (self.lanes > 1)}"]
        workers = [] if self.workers is None else [f"{self.workers} worker{'s' * (self.workers > 1)}"]
        numbers = ", ".join([*lanes, *workers])
        return f"{self.where} ({numbers})" if numbers else str(self.where)


def expected(measured: Measured, asked: Asked, cores: int, ruled_out: Mapping[str, str]) -> list[Choice]:
    """The best choice of each place that is not ruled out, the simplest place first.

    ruled_out    place -> why it can't be
    """
    places = {"inline": _inline, "threads": _threads, "processes": _processes, "rollouts": _rollouts}
    choices = []
    for where, candidates in places.items():
        made = list(candidates(measured, asked, cores)) if where not in ruled_out else []
        if made:
            choices.append(max(made, key=lambda choice: choice.steps_per_s))
    return choices


def close(choices: Sequence[Choice]) -> list[Choice]:
    """Those of which any may be the fastest, as far as can be reckoned."""
    most = max(choice.steps_per_s for choice in choices)
    return [choice for choice in choices if choice.steps_per_s >= _CLOSE * most]


def fastest(choices: Sequence[Choice], worth: float = WORTH_EXPECTED) -> Choice:
    """Of choices with the simplest place first: the fastest, or a simpler one that is as good.

    worth    how much faster than inline another place must be
    """
    most = max(choice.steps_per_s for choice in choices)
    best = next(choice for choice in choices if choice.steps_per_s >= _AS_GOOD * most)
    first = choices[0]
    return first if first.where == "inline" and best.steps_per_s < worth * first.steps_per_s else best


def refusals(asked: Asked) -> dict[str, str]:
    """Places that would not do what was asked for, and why."""
    if asked.max_batch is not None or asked.forward_in_thread:
        return {"rollouts": "max_batch and forward_in_thread are for a forward pass over several lanes"}
    if not isinstance(asked.metrics, MetricsLogger | None):
        return {"rollouts": f"metrics of type {type(asked.metrics).__name__} can't be merged"}
    return {}


def _inline(measured: Measured, asked: Asked, cores: int) -> Iterator[Choice]:
    lanes = asked.lanes
    if lanes is None and asked.max_batch is not None and asked.max_batch < measured.slots:
        lanes = _parts(measured.slots, asked.max_batch)  # a lane's slots go together
    each = _parts(measured.slots, lanes or 1)
    yield Choice("inline", lanes, None, measured.slots / ((lanes or 1) * _turn(measured, each)))


def _threads(measured: Measured, asked: Asked, cores: int) -> Iterator[Choice]:
    """A thread for each lane: as long as environments wait, others go on."""
    for lanes in _lanes(measured, asked):
        each = _parts(measured.slots, lanes)
        rest = measured.rest(each) + _HAND_OVER_S
        working = lanes * (measured.env(each) * (1 - measured.waits) + rest)
        yield Choice("threads", lanes, None, measured.slots / max(working, measured.env(each) + rest))


def _processes(measured: Measured, asked: Asked, cores: int) -> Iterator[Choice]:
    """Environments on the other cores, all else on this one."""
    for lanes in _lanes(measured, asked):
        each, workers = _parts(measured.slots, lanes), min(lanes, asked.workers or max(1, cores - 1))
        env, rest = measured.env(each), measured.rest(each) + _HAND_OVER_S
        working = env * (1 - measured.waits)
        busiest = max(_parts(lanes, workers) * working, lanes * rest, lanes * (working + rest) / cores)
        yield Choice("processes", lanes, workers, measured.slots / max(busiest, env + rest))


def _rollouts(measured: Measured, asked: Asked, cores: int) -> Iterator[Choice]:
    """Everything on every core, but for the reader; several lanes of one worker have a thread each."""
    workers = min(measured.slots, asked.lanes or measured.slots, asked.workers or cores)
    for lanes in [workers, *_lanes(measured, asked)]:
        if lanes < workers or asked.lanes not in (None, lanes):
            continue
        each, together = _parts(measured.slots, lanes), _parts(lanes, workers)
        turn = _turn(measured, each) + _FRAGMENT_S / asked.fragment_length
        working = together * (turn - measured.env(each) * measured.waits) * max(1.0, workers / cores)
        yield Choice("rollouts", lanes, workers, _KEPT * measured.slots / max(working, turn))


def _turn(measured: Measured, slots: int) -> float:
    """Seconds of a vector step of one lane, one thing after the other."""
    return measured.env(slots) + measured.rest(slots)


def _lanes(measured: Measured, asked: Asked) -> list[int]:
    """How many lanes may be worth a try: those of one size, and none too large for a forward pass."""
    slots = measured.slots
    if asked.lanes is not None:
        return [asked.lanes]
    even = [lanes for lanes in range(2, slots + 1) if slots % lanes == 0]
    return [lanes for lanes in even if asked.max_batch is None or slots // lanes <= asked.max_batch]


def _parts(count: int, size: int) -> int:
    return -(-count // size)


def told(
    best: Choice,
    measured: Measured,
    seen: Mapping[str, Sequence[Choice]],
    asked: Asked,
    ruled_out: Mapping[str, str],
) -> str:
    """Why it was chosen, for `explain()`.

    seen         how steps a second are known -> choices of which they are known so
    ruled_out    place -> why it can't be
    """
    env, rest = measured.env(measured.slots) * 1e6, measured.rest(measured.slots) * 1e6
    parts = [
        f"where='{best.where}': a step of {measured.slots} environments takes {env:.0f} µs ({measured.waits:.0%} of it "
        f"waiting), all else of a vector step {rest:.0f} µs"
    ]
    for how, choices in seen.items():
        parts.append(f"{how}: " + (", ".join(f"{choice} {choice.steps_per_s:,.0f}" for choice in choices) or "none"))
    if asked.workers is not None and best.workers is None:
        parts.append(f"workers={asked.workers} is not used")
    parts += [f"not where='{where}': {why}" for where, why in ruled_out.items()]
    return "; ".join(parts)
