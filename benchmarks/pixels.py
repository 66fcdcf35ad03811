"""84×84×4 pixels and the network of the Nature paper, with one forward pass for all, in one thread of torch.

In worker processes one lane steps while the other is in the forward pass. For few slots the whole of them at once, with
nothing handed over, is as good: passes over half of them cost more than half.

Beside forward passes alone, with sampling, over as many slots, in one torch thread: what is left of a rollout's time
when everything else is hidden behind them. A line of its own has two lanes of the fewest slots, beside passes over as
many as one of them has.

    python -m benchmarks.pixels [--quick]
"""

from typing import Any

import rollflow
from benchmarks.command import run
from benchmarks.envs import PixelEnv
from benchmarks.loop import FRAGMENT_LENGTH, Forward
from benchmarks.pairs import Record, Sizes, in_steady_state, in_turns, record, steps_per_s
from benchmarks.policies import NatureCnn
from rollflow import Rollout

SLOTS = (8, 32)
WAYS: dict[str, dict[str, Any]] = {
    "inline": {},
    "processes": {"where": "processes", "workers": 1, "lanes": 2, "prefetch": 1},
}


def measure(sizes: Sizes, slots: tuple[int, ...] = SLOTS) -> list[Record]:
    """Two lines for each number of slots, and one for two lanes of the fewest."""
    fewest = min(slots)
    lines = [_measured("pixels", count, count, way, sizes) for count in slots for way in WAYS]
    return [*lines, _measured(f"pixels, two lanes of {fewest}", 2 * fewest, fewest, "processes", sizes)]


def _measured(workload: str, slots: int, of_pass: int, way: str, sizes: Sizes) -> Record:
    forward, seconds = Forward(NatureCnn(), PixelEnv.observation_space, of_pass), 2 * sizes.seconds
    steps_per_s(forward.fragment, sizes.seconds)  # warm up
    pairs = in_turns(lambda: _ours(slots, way, seconds), lambda: steps_per_s(forward.fragment, seconds), sizes.rounds)
    return record(workload, slots, pairs, aim=0.95, where=way, beside_name=f"forward passes alone, over {of_pass}")


def _ours(slots: int, way: str, seconds: float) -> float:
    with Rollout(
        PixelEnv,
        module=NatureCnn(),
        num_envs=slots,
        **WAYS[way],
        fragment_length=FRAGMENT_LENGTH,
        forward=rollflow.Forward(flat=True),
        seed=0,
    ) as rollout:
        return in_steady_state(rollout, seconds)


if __name__ == "__main__":
    run(measure)
