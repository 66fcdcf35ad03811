"""CartPole-v1 with a small network, beside the loop that somebody would write by hand.

A rollflow run gives the same batch as the loop, with true episodes, log-probabilities, values and counters, through the
default pipelines. Environments are gymnasium's vectorized CartPole, or plain ones, which the loop steps by
`SyncVectorEnv`.

    python -m benchmarks.cartpole [--quick]
"""

from typing import Any

import gymnasium as gym

from benchmarks.command import run
from benchmarks.envs import PLAIN_CARTPOLE
from benchmarks.loop import FRAGMENT_LENGTH, Loop, side_by_side
from benchmarks.pairs import Record, Sizes, paired
from benchmarks.policies import Mlp
from rollflow import Rollout

VECTORIZED, PLAIN = (64, 256, 1024), (1, 8, 64, 256)


def measure(sizes: Sizes, vectorized: tuple[int, ...] = VECTORIZED, plain: tuple[int, ...] = PLAIN) -> list[Record]:
    """A line for each number of slots."""
    lines = [
        _measured("CartPole, vectorized", "CartPole-v1", slots, _vectorized(slots), 1.0, sizes) for slots in vectorized
    ]
    for slots in plain:
        aim = 0.9 if slots == 1 else 1.05
        env = side_by_side(PLAIN_CARTPOLE, slots)
        lines.append(_measured("CartPole, plain", PLAIN_CARTPOLE, slots, env, aim, sizes))
    return lines


def _vectorized(slots: int) -> Any:
    return gym.make_vec("CartPole-v1", num_envs=slots, vectorization_mode="vector_entry_point")


def _measured(workload: str, env: Any, slots: int, beside: Any, aim: float, sizes: Sizes) -> Record:
    loop = Loop(beside, Mlp())
    options: Any = {"num_envs": slots, "fragment_length": FRAGMENT_LENGTH, "seed": 0}
    with Rollout(env, module=Mlp(), **options) as rollout:
        batches = iter(rollout.batches())
        return paired(workload, slots, lambda: len(next(batches)["obs"]), loop.fragment, aim=aim, sizes=sizes)


if __name__ == "__main__":
    run(measure)
