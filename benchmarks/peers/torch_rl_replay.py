"""TorchRL's TensorDictReplayBuffer, uniform and prioritized."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data import TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer

from benchmarks.pairs import Run

Sampler = Callable[[int], Run]


def peer(
    fragments: list[dict[str, Any]], capacity: int, storage: Callable[[int], Any]
) -> tuple[Run, Sampler, Sampler | None]:
    """Functions that insert all fragments, whole, and that sample a batch of a size, uniform and prioritized.

    storage    makes one of so many transitions

    The last function is None where TorchRL's compiled sum tree does not go with the torch that is installed.
    """
    rows = [
        TensorDict(
            {name: torch.from_numpy(value.reshape(-1, *value.shape[2:]).copy()) for name, value in each.items()},
            batch_size=[each["rewards"].size],
        )
        for each in fragments
    ]
    uniform = TensorDictReplayBuffer(storage=storage(capacity))
    prioritized = None
    try:
        prioritized = TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=storage(capacity))
    except RuntimeError as error:
        print(f"TorchRL's prioritized replay: left out: {error}", file=sys.stderr)
    for buffer in (uniform, *([] if prioritized is None else [prioritized])):
        for _ in range(-(-capacity // sum(len(each) for each in rows))):
            for each in rows:
                buffer.extend(each)

    def insert() -> int:
        for each in rows:
            uniform.extend(each)
        return sum(len(each) for each in rows)

    def sampler(size: int) -> Run:
        return lambda: len(uniform.sample(size))

    def prioritized_sampler(size: int) -> Run:
        values = torch.rand(size)

        def sample() -> int:
            batch = prioritized.sample(size)
            batch["td_error"] = values
            prioritized.update_tensordict_priority(batch)
            return size

        return sample

    return insert, sampler, None if prioritized is None else prioritized_sampler
