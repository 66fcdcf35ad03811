"""A policy that acts without a rollout: one observation, a batch of 64, and loading, each beside what it is made of.

`act` may take 1.5 times as long as the bare forward pass with sampling, and 20 µs more. `act_batch` is held against a
rollout over environments that do nothing, and loading against 100 ms. Steps are calls for one environment's action.

    python -m benchmarks.serving [--quick]
"""

import tempfile
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from benchmarks.command import run
from benchmarks.envs import NoopEnv
from benchmarks.pairs import Record, Sizes, in_turns, paired, record, steps_per_s, within
from rollflow.nodes import Rollout
from rollflow.policy import Policy

HIDDENS, BATCH, CALLS = (64, 64), 64, 50
TIMES, MORE_S, LOAD_S = 1.5, 20e-6, 0.1


def measure(sizes: Sizes, batch: int = BATCH) -> list[Record]:
    """A line each for `act`, `act_batch` and `load`."""
    with _rollout(1) as rollout:
        policy = rollout.policy(explore=True)
    return [_act(policy, sizes), _act_batch(batch, sizes), _load(policy, sizes)]


def _rollout(slots: int) -> Rollout:
    return Rollout(NoopEnv(slots), model_config={"fcnet_hiddens": HIDDENS}, fragment_length=CALLS, seed=0)


def _act(policy: Policy, sizes: Sizes) -> Record:
    observation, module = np.zeros(4, np.float32), policy.module

    def ours() -> int:
        for _ in range(CALLS):
            policy.act(observation)
        return CALLS

    def bare() -> int:
        for _ in range(CALLS):
            with torch.inference_mode():
                output = module.forward_exploration({"obs": torch.from_numpy(observation[None])})
                torch.distributions.Categorical(logits=output["action_dist_inputs"]).sample().numpy()
        return CALLS

    for each in (ours, bare):
        steps_per_s(each, sizes.seconds / 2)  # warm up
    pairs = in_turns(lambda: steps_per_s(ours, sizes.seconds), lambda: steps_per_s(bare, sizes.seconds), sizes.rounds)
    allowed = [(mine, 1 / (TIMES / other + MORE_S)) for mine, other in pairs]
    return record("act, one observation", 1, allowed, aim=1.0, beside_name="1.5 × the bare pass with sampling + 20 µs")


def _act_batch(slots: int, sizes: Sizes) -> Record:
    observations, rewards = np.zeros((slots, 4), np.float32), np.zeros(slots, np.float32)
    with _rollout(slots) as rollout:
        policy = rollout.policy(explore=True)
        fragments = iter(rollout.fragments())

        def ours() -> int:
            for _ in range(CALLS):
                policy.act_batch(observations, rewards)
            return CALLS * slots

        def theirs() -> int:
            next(fragments)
            return CALLS * slots

        return paired("act_batch", slots, ours, theirs, aim=0.9, sizes=sizes, beside_name="the rollout's own rate")


def _load(policy: Policy, sizes: Sizes) -> Record:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "policy")
        policy.save(path)
        times = []
        for _ in range(sizes.rounds + 1):
            began = perf_counter()
            Policy.load(path)
            times.append(perf_counter() - began)
    milliseconds = sorted(times[1:] or times)[len(times[1:]) // 2] * 1e3
    return within("load, ms", 1, milliseconds, LOAD_S * 1e3, milliseconds=round(milliseconds, 1), beside_name="100 ms")


if __name__ == "__main__":
    run(measure)
