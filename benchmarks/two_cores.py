"""Both cores: whole rollouts in worker processes, beside as many copies of the loop in a process each, added up.

With more workers than cores each has few slots, which costs the loops as much; that nothing collapses is the aim then.

python -m benchmarks.two_cores [--quick]
"""

from typing import Any

from benchmarks.command import run
from benchmarks.envs import PixelEnv, plain_cartpole
from benchmarks.loop import FRAGMENT_LENGTH, loops_side_by_side
from benchmarks.pairs import Record, Sizes, in_steady_state, in_turns, record
from benchmarks.policies import Mlp, NatureCnn
from rollflow.nodes import Rollout

CASES = (
    ("pixels, two cores", PixelEnv, NatureCnn, 32, 2, 0.95),
    ("CartPole, plain, two cores", plain_cartpole, Mlp, 64, 2, 0.95),
    ("CartPole, plain, 8 workers", plain_cartpole, Mlp, 64, 8, 0.75),
    ("CartPole, plain, 32 workers", plain_cartpole, Mlp, 64, 32, 0.75),
)


def measure(sizes: Sizes, cases: tuple[Any, ...] = CASES) -> list[Record]:
    """A line for each case."""
    return [_measured(sizes, *case) for case in cases]


def _measured(sizes: Sizes, workload: str, env: Any, policy: Any, slots: int, workers: int, aim: float) -> Record:
    seconds = max(2 * sizes.seconds, 1.0)
    pairs = in_turns(
        lambda: rollouts(env, policy, slots, workers, seconds),
        lambda: loops_side_by_side(env, policy, slots, copies=workers, seconds=seconds),
        max(1, sizes.rounds // 3),
    )
    told = {"where": "rollouts", "workers": workers, "beside_name": f"{workers} loops"}
    return record(workload, slots, pairs, aim=aim, **told)


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
        flat_forward=True,
        seed=0,
    ) as rollout:
        return in_steady_state(rollout, seconds)


if __name__ == "__main__":
    run(measure)
