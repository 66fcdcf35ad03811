"""cpprb's ReplayBuffer and PrioritizedReplayBuffer."""

from collections.abc import Callable
from typing import Any

import numpy as np
from cpprb import PrioritizedReplayBuffer, ReplayBuffer

from benchmarks.pairs import Run

Sampler = Callable[[int], Run]


def peer(fragments: list[dict[str, Any]], capacity: int) -> tuple[Run, Sampler, Sampler]:
    """Functions that insert all fragments, whole, and that sample a batch of a size, uniform and prioritized."""
    rows = [{name: value.reshape(-1, *value.shape[2:]) for name, value in each.items()} for each in fragments]
    kinds = {name: {"shape": value.shape[1:] or 1, "dtype": value.dtype} for name, value in rows[0].items()}
    uniform, prioritized = ReplayBuffer(capacity, kinds), PrioritizedReplayBuffer(capacity, kinds, alpha=0.6)

    def insert_into(buffer: Any) -> int:
        for each in rows:
            buffer.add(**each)
        return sum(len(each["rewards"]) for each in rows)

    for buffer in (uniform, prioritized):
        for _ in range(-(-capacity // sum(len(each["rewards"]) for each in rows))):
            insert_into(buffer)

    def sampler(size: int) -> Run:
        return lambda: len(uniform.sample(size)["rewards"])

    def prioritized_sampler(size: int) -> Run:
        values = np.random.default_rng(0).random(size)

        def sample() -> int:
            batch = prioritized.sample(size, beta=0.4)
            prioritized.update_priorities(batch["indexes"], values)
            return size

        return sample

    return lambda: insert_into(uniform), sampler, prioritized_sampler
