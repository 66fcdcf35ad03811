"""Memory at 64 slots: how much more than the loop's at its peak, and whether it grows over millions of steps.

`ratio` is what is allowed over what was measured: 40 MB more than the loop, and 5 MB of growth.

    python -m benchmarks.memory [--quick]
"""

import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch

from benchmarks.command import run
from benchmarks.loop import FRAGMENT_LENGTH, Loop
from benchmarks.pairs import FULL, Record, Sizes, within
from benchmarks.policies import Mlp
from rollflow import Rollout

SLOTS, ALLOWED_MB, GROWTH_MB = 64, 40.0, 5.0


def measure(sizes: Sizes, steps: int | None = None) -> list[Record]:
    """A line for the peak, and one for growth over ten million steps; a million where little is measured."""
    steps = steps or (10_000_000 if sizes == FULL else 1_000_000)
    [loop, _], [ours, grown] = _measured("loop", steps // 10), _measured("rollflow", steps)
    return [
        within("memory, peak", SLOTS, ours - loop, ALLOWED_MB, mb=round(ours), loop_mb=round(loop)),
        within("memory, growth", SLOTS, grown, GROWTH_MB, mb=round(grown, 1), steps=steps),
    ]


def _measured(what: str, steps: int) -> list[float]:
    command = [sys.executable, "-m", "benchmarks.memory", what, str(steps)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [float(number) for number in told.split()]


def _work(what: str, steps: int) -> tuple[float, float]:
    """The peak, and what was added after a tenth of the steps, in MB."""
    torch.set_num_threads(1)
    if what == "loop":
        env = gym.make_vec("CartPole-v1", num_envs=SLOTS, vectorization_mode="vector_entry_point")
        fragment = Loop(env, Mlp()).fragment
        return _stepped(fragment, steps)
    options: Any = {"num_envs": SLOTS, "fragment_length": FRAGMENT_LENGTH, "seed": 0}
    with Rollout("CartPole-v1", module=Mlp(), **options) as rollout:
        batches = iter(rollout.batches())
        return _stepped(lambda: len(next(batches)["obs"]), steps)


def _stepped(fragment: Any, steps: int) -> tuple[float, float]:
    made, early = 0, 0.0
    while made < steps:
        made += fragment()
        if not early and made > steps / 10:
            early = _resident_mb()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, _resident_mb() - early


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


if __name__ == "__main__":
    if len(sys.argv) > 2:
        print(*_work(sys.argv[1], int(sys.argv[2])))
    else:
        run(measure)
