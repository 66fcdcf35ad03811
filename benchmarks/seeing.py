"""Cost of being watched: rollouts with the stall doctor, beside the same ones without.

Environment and module do nothing, so that what a step costs is rollflow's own; and CartPole with a small network.

    python -m benchmarks.seeing [--quick]
"""

from collections.abc import Callable

from benchmarks.command import run
from benchmarks.envs import NoopEnv
from benchmarks.loop import FRAGMENT_LENGTH
from benchmarks.pairs import Record, Sizes, in_turns, record, steps_per_s
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
    """Each is opened for its own measurement alone: a watcher looks at nothing but what it watches."""

    def rate(stall_after: float | None) -> float:
        with make(stall_after=stall_after, fragment_length=FRAGMENT_LENGTH, seed=0) as rollout:
            fragments = iter(rollout.fragments())

            def fragment() -> int:
                next(fragments)
                return FRAGMENT_LENGTH * slots

            fragment()
            return steps_per_s(fragment, sizes.seconds)

    pairs = in_turns(lambda: rate(5.0), lambda: rate(None), sizes.rounds + 1)
    del pairs[0]  # to warm up
    return record(workload, slots, pairs, aim=AIM, beside_name="without the doctor")


if __name__ == "__main__":
    run(measure)
