"""What it costs to be watched: rollouts with the stall doctor, beside the same ones without.

Environment and module do nothing, so that what a step costs is rollflow's own; and CartPole with a small network.

    python -m benchmarks.seeing [--quick]
"""

from collections.abc import Callable
from typing import Any

from benchmarks.command import run
from benchmarks.envs import NoopEnv
from benchmarks.loop import FRAGMENT_LENGTH
from benchmarks.pairs import Record, Sizes, paired
from benchmarks.policies import Mlp, Noop
from rollflow.nodes import Rollout

SLOTS = (1, 64, 1024)
AIM = 0.99


def measure(sizes: Sizes, slots: tuple[int, ...] = SLOTS) -> list[Record]:
    """Two lines for each number of slots."""
    lines = []
    for count in slots:
        lines.append(_measured("stall doctor, nothing done", _noop(count), count, sizes))
        lines.append(_measured("stall doctor, CartPole", _cartpole(count), count, sizes))
    return lines


def _noop(slots: int) -> Callable[..., Rollout]:
    return lambda **options: Rollout(NoopEnv(slots), module=Noop(slots), **options)


def _cartpole(slots: int) -> Callable[..., Rollout]:
    return lambda **options: Rollout("CartPole-v1", num_envs=slots, module=Mlp(), flat_forward=True, **options)


def _measured(workload: str, make: Callable[..., Rollout], slots: int, sizes: Sizes) -> Record:
    options: Any = {"fragment_length": FRAGMENT_LENGTH, "seed": 0}
    with make(stall_after=5.0, **options) as watched, make(stall_after=None, **options) as alone:
        ours, others = iter(watched.fragments()), iter(alone.fragments())

        def of_ours() -> int:
            next(ours)
            return FRAGMENT_LENGTH * slots

        def of_others() -> int:
            next(others)
            return FRAGMENT_LENGTH * slots

        return paired(workload, slots, of_ours, of_others, aim=AIM, sizes=sizes, beside_name="without the doctor")


if __name__ == "__main__":
    run(measure)
