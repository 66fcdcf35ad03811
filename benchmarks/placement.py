"""The place that `where="auto"` chooses, beside the best of a few settings by hand, for whatever it may matter to.

Those by hand are measured in turn first; the best of them is measured once more then, in pairs with `auto`, so that
`auto` is not compared with what was the best by chance. What is left to rollflow is measured and chosen anew every
time. `--quick` has one number of slots for each workload.

    python -m benchmarks.placement [--quick]
"""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

from benchmarks.command import run
from benchmarks.envs import PLAIN_CARTPOLE, CountingEnv, PixelEnv, SleepEnv
from benchmarks.pairs import QUICK, Record, Sizes, in_steady_state, in_turns, record
from benchmarks.policies import Mlp, NatureCnn, Zeros
from rollflow import Forward, Rollout

WAYS: dict[str, dict[str, Any]] = {
    "auto": {"where": "auto"},
    "inline": {"where": "inline"},
    "threads": {"where": "threads"},
    "processes, 2 lanes": {"where": "processes", "workers": 1, "lanes": 2},
    "processes, 16 lanes": {"where": "processes", "workers": 2, "lanes": 16},
    "rollouts, 2 lanes": {"where": "rollouts", "workers": 2},
    "rollouts, 16 lanes": {"where": "rollouts", "workers": 2, "lanes": 16},
}
CHEAP = ("inline", "processes, 2 lanes", "rollouts, 2 lanes")
WAITING = ("threads", "processes, 16 lanes", "rollouts, 16 lanes")
CASES: tuple[Any, ...] = (
    ("CartPole, plain", PLAIN_CARTPOLE, Mlp, 8, 128, CHEAP),
    ("CartPole, plain", PLAIN_CARTPOLE, Mlp, 64, 128, CHEAP),
    ("CartPole, plain", PLAIN_CARTPOLE, Mlp, 256, 128, CHEAP),
    ("CartPole, vectorized", "CartPole-v1", Mlp, 64, 128, CHEAP),
    ("CartPole, vectorized", "CartPole-v1", Mlp, 1024, 128, CHEAP),
    ("pixels", PixelEnv, NatureCnn, 8, 128, CHEAP),
    ("pixels", PixelEnv, NatureCnn, 32, 128, CHEAP),
    ("steps of lognormal time", SleepEnv, Mlp, 16, 32, WAITING),
    ("steps that do nothing", CountingEnv, Zeros, 64, 128, CHEAP),
)


def measure(sizes: Sizes, cases: tuple[Any, ...] = CASES) -> list[Record]:
    """A line for each case."""
    if sizes == QUICK:  # the last of each workload
        cases = tuple({case[0]: case for case in cases}.values())
    return [_measured(sizes, *case) for case in cases]


def _measured(
    sizes: Sizes, workload: str, env: Any, policy: Any, slots: int, length: int, ways: Sequence[str]
) -> Record:
    chosen: Counter[str] = Counter()

    def rate(way: str) -> float:
        with Rollout(
            env,
            module=policy(),
            num_envs=slots,
            **WAYS[way],
            fragment_length=length,
            prefetch=1,
            forward=Forward(flat=True),
            seed=0,
        ) as rollout:
            if way == "auto":
                chosen[rollout.placement.split("'")[1]] += 1
            return in_steady_state(rollout, 2 * sizes.seconds)

    by_hand: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(max(1, sizes.rounds // 4)):
        for way in ways[:: -1 if number % 2 else 1]:
            by_hand[way].append(rate(way))
    best = max(ways, key=lambda way: median(by_hand[way]))
    pairs = in_turns(partial(rate, "auto"), partial(rate, best), max(1, sizes.rounds * 2 // 3))
    made = {way: round(median(rates)) for way, rates in by_hand.items()}
    told = {"where": chosen.most_common(1)[0][0], "chosen": dict(chosen), "beside_name": best, "by_hand": made}
    return record(f"auto: {workload}", slots, pairs, aim=0.95, **told)


if __name__ == "__main__":
    run(measure)
