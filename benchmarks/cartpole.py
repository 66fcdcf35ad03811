"""CartPole-v1 with a small network, beside the loop that somebody would write by hand.

A rollflow run gives the same batch as the loop, with true episodes, log-probabilities, values and counters, through the
default pipelines. Environments are gymnasium's vectorized CartPole, or plain ones, which the loop steps by
`SyncVectorEnv`. Each is also run beside a loop whose act step torch.jit has traced and frozen.

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

VECTORIZED, PLAIN = (8, 64, 256, 1024), (1, 8, 64, 256)


def measure(sizes: Sizes, vectorized: tuple[int, ...] = VECTORIZED, plain: tuple[int, ...] = PLAIN) -> list[Record]:
    """A line for each number of slots and each of the two loops."""
    lines = []
    for is_traced, aim in ((False, 1.0), (True, 0.95)):
        beside = ", a traced loop" if is_traced else ""
        for slots in vectorized:
            loop = Loop(_vectorized(slots), Mlp(), is_traced=is_traced)
            lines.append(_measured(f"CartPole, vectorized{beside}", "CartPole-v1", slots, loop, aim, sizes))
        for slots in plain:
            loop = Loop(side_by_side(PLAIN_CARTPOLE, slots), Mlp(), is_traced=is_traced)
            lines.append(_measured(f"CartPole, plain{beside}", PLAIN_CARTPOLE, slots, loop, aim, sizes))
    return lines


def _vectorized(slots: int) -> Any:
    return gym.make_vec("CartPole-v1", num_envs=slots, vectorization_mode="vector_entry_point")


def _measured(workload: str, env: Any, slots: int, loop: Loop, aim: float, sizes: Sizes) -> Record:
    options: Any = {"num_envs": slots, "fragment_length": FRAGMENT_LENGTH, "seed": 0}
    with Rollout(env, module=Mlp(), **options) as rollout:
        batches = iter(rollout.batches())
        return paired(workload, slots, lambda: len(next(batches)["obs"]), loop.fragment, aim=aim, sizes=sizes)


if __name__ == "__main__":
    run(measure)
