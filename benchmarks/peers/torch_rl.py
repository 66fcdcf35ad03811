"""TorchRL's collectors, over gymnasium's `SyncVectorEnv`, one TensorDict a fragment."""

import warnings
from functools import partial
from typing import Any

import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector, MultiAsyncCollector
from torchrl.envs.libs.gym import GymWrapper

from benchmarks.pairs import steps_per_s
from benchmarks.policies import sampled


class Runner:
    """Collects a fragment at a time, in this process."""

    def __init__(self, make: Any, slots: int, fragment_length: int, *, policy: Any) -> None:
        options = _options(slots, fragment_length)
        self._collector = iter(Collector(_env(make, slots), _module(policy), **options))

    def fragment(self) -> int:
        """One fragment; how many transitions it has."""
        return int(next(self._collector).numel())


def in_processes(make: Any, slots: int, fragment_length: int, *, policy: Any, workers: int, seconds: float) -> float:
    """Steps per second of a collector with so many worker processes, without its first batches."""
    each = slots // workers
    with warnings.catch_warnings(action="ignore"):
        collector = MultiAsyncCollector(
            [partial(_env, make, each)] * workers,
            _module(policy),
            num_threads=1,
            trust_policy=True,
            **_options(each, fragment_length),
        )
        try:
            batches = iter(collector)
            for _ in range(2 * workers):
                next(batches)
            return steps_per_s(lambda: int(next(batches).numel()), seconds)
        finally:
            collector.shutdown()


class _Act(torch.nn.Module):
    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, observation: Any) -> Any:
        output = self.policy._forward({"obs": observation})
        return *sampled(output["action_dist_inputs"]), output["vf_preds"]


def _module(policy: Any) -> TensorDictModule:
    return TensorDictModule(_Act(policy()), in_keys=["observation"], out_keys=["action", "logp", "value"])


def _env(make: Any, slots: int) -> GymWrapper:
    torch.set_num_threads(1)
    envs = SyncVectorEnv([make] * slots, autoreset_mode=AutoresetMode.DISABLED)
    return GymWrapper(envs, categorical_action_encoding=True)


def _options(slots: int, fragment_length: int) -> dict[str, Any]:
    frames = slots * fragment_length
    return {"frames_per_batch": frames, "total_frames": -1, "auto_register_policy_transforms": False}
