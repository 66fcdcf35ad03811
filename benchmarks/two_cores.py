"""Both cores: whole rollouts in worker processes, beside as many copies of the loop in a process each, added up.

With more workers than cores each has few slots, which costs the loops as much; that nothing collapses is the aim then.
Lines of their own have 8 and 32 workers beside 2, all measured in turn; `--quick` leaves 32 out.

    python -m benchmarks.two_cores [--quick]
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.command import run
from benchmarks.envs import PLAIN_CARTPOLE, PixelEnv
from benchmarks.loop import FRAGMENT_LENGTH, loops_side_by_side
from benchmarks.pairs import QUICK, Record, Sizes, in_steady_state, in_turns, record
from benchmarks.policies import Mlp, NatureCnn
from rollflow import Forward, Rollout

CASES = (
    ("pixels", PixelEnv, NatureCnn, 32),
    ("CartPole, plain", PLAIN_CARTPOLE, Mlp, 64),
)
AIMS = {2: 0.95, 8: 0.75, 32: 0.75}  # workers -> aim beside as many loops
FEW, MANY = 2, 32


def measure(sizes: Sizes, cases: tuple[Any, ...] = CASES, aims: Mapping[int, float] = AIMS) -> list[Record]:
    """For each case a line for each number of workers, and one more for those that are many."""
    if sizes == QUICK:  # so many processes take longer to start than they are measured
        aims = {workers: aim for workers, aim in aims.items() if workers < MANY}
    return [line for case in cases for line in _measured(sizes, *case, aims)]


def _measured(
    sizes: Sizes, workload: str, env: Any, policy: Any, slots: int, aims: Mapping[int, float]
) -> list[Record]:
    seconds = max(2 * sizes.seconds, 1.0)
    pairs: dict[int, list[tuple[float, float]]] = {workers: [] for workers in aims}
    for number in range(max(1, sizes.rounds // 3)):
        for workers in list(pairs)[:: -1 if number % 2 else 1]:
            ours = partial(rollouts, env, policy, slots, workers, seconds)
            theirs = partial(loops_side_by_side, env, policy, slots, copies=workers, seconds=seconds)
            pairs[workers] += in_turns(ours, theirs, 1)
    lines = []
    for workers, aim in aims.items():
        told: dict[str, Any] = {"where": "rollouts", "workers": workers}
        name = f"{workload}, {workers} workers"
        lines.append(record(name, slots, pairs[workers], aim=aim, beside_name=f"{workers} loops", **told))
        if workers != FEW:
            few = [(mine, of_few) for (mine, _), (of_few, _) in zip(pairs[workers], pairs[FEW], strict=True)]
            lines.append(record(f"{name} beside {FEW}", slots, few, aim=None, beside_name=f"{FEW} workers", **told))
    return lines


def rollouts(env: Any, policy: Any, slots: int, workers: int, seconds: float) -> float:
    """Steps per second of whole rollouts in so many worker processes."""
    with Rollout(
        env,
        module=policy(),
        num_envs=slots,
        where="rollouts",
        workers=workers,
        prefetch=1,
        fragment_length=FRAGMENT_LENGTH,
        forward=Forward(flat=True),
        seed=0,
    ) as rollout:
        return in_steady_state(rollout, seconds)


if __name__ == "__main__":
    run(measure)
