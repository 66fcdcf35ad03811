"""Steps that take lognormal time, 5 ms in the mean: beside what is possible where nobody waits for anybody.

Lines of their own have the processor seconds of a million steps, beside those of a thread for each environment and one
that makes the passes, and the memory, of all processes together; `ratio` is what is allowed over what was measured.

    python -m benchmarks.stragglers [--quick]
"""

import os
from pathlib import Path
from typing import Any

import psutil

from benchmarks.command import run
from benchmarks.envs import SleepEnv
from benchmarks.pairs import Record, Sizes, record, steps_per_s, within
from benchmarks.policies import Mlp
from rollflow.nodes import Rollout

SLOTS, FRAGMENT_LENGTH = 16, 32
ALLOWED_CPU_S, ALLOWED_MB = 136, 400  # of a million steps; of all processes


def measure(sizes: Sizes, places: tuple[str, ...] = ("threads", "processes")) -> list[Record]:
    """Three lines for threads, and three for processes."""
    return [line for where in places for line in _measured(sizes, where)]


def _measured(sizes: Sizes, where: Any) -> list[Record]:
    possible = SLOTS / SleepEnv.MEAN_S
    options: Any = {"fragment_length": FRAGMENT_LENGTH, "prefetch": 1, "flat_forward": True, "seed": 0}
    with Rollout(SleepEnv, module=Mlp(), num_envs=SLOTS, lanes=SLOTS, where=where, **options) as rollout:
        batches, steps = iter(rollout.batches()), 0

        def batch() -> int:
            nonlocal steps
            taken = len(next(batches)["obs"])
            steps += taken
            return taken

        batch()
        steps, before = 0, processor_seconds()
        pairs = [(steps_per_s(batch, max(1.0, sizes.seconds)), possible) for _ in range(sizes.rounds)]
        cpu, memory = (processor_seconds() - before) / steps * 1e6, memory_mb()
    told = {"where": where, "beside_name": "16 / mean"}
    return [
        record("steps of lognormal time", SLOTS, pairs, aim=0.95, **told),
        within("the same, processor time", SLOTS, cpu, ALLOWED_CPU_S, where=where, cpu_s_per_mstep=round(cpu)),
        within("the same, memory", SLOTS, memory, ALLOWED_MB, where=where, pss_mb=round(memory)),
    ]


def processor_seconds() -> float:
    """Of this process and all below it."""
    me = psutil.Process()
    times = [process.cpu_times() for process in (me, *me.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


def memory_mb() -> float:
    """Of this process and all below it, memory that they share counted once."""
    me, total = psutil.Process(os.getpid()), 0
    for process in (me, *me.children(recursive=True)):
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


if __name__ == "__main__":
    run(measure)
