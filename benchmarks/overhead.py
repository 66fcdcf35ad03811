"""What the engine itself costs per vector step: an environment and a module that do nothing, beside a bare loop.

The bare loop calls the same environment and the same module and writes the same rows into preallocated arrays; what
rollflow takes longer is its own cost, `own_us`: connector pipelines, episodes, counters, backpressure. It may be 25 µs:
the figures beside rollflow's are those of a bare loop that is so much slower. Steps are vector steps.

    python -m benchmarks.overhead [--quick]
"""

import statistics
from typing import Any

import numpy as np
import torch

from benchmarks.command import run
from benchmarks.envs import NoopEnv
from benchmarks.loop import FRAGMENT_LENGTH
from benchmarks.pairs import Record, Sizes, record, steps_per_s
from benchmarks.policies import Noop
from rollflow import Rollout

SLOTS = (1, 8, 64, 1024)
ALLOWED_US = 25.0


class BareLoop:
    """The loop that somebody would write by hand."""

    def __init__(self, num_envs: int) -> None:
        self._env, self._module = NoopEnv(num_envs), Noop(num_envs)
        shape = (FRAGMENT_LENGTH, num_envs)
        self._obs = np.empty((*shape, 4), np.float32)
        self._actions, self._values = np.empty(shape, np.int64), np.empty(shape, np.float32)
        self._rewards = np.empty(shape, np.float32)
        self._terminateds, self._truncateds = np.empty(shape, np.bool_), np.empty(shape, np.bool_)
        self._last, _ = self._env.reset()

    def fragment(self) -> int:
        """One fragment's steps."""
        observations = self._last
        with torch.inference_mode():
            for t in range(FRAGMENT_LENGTH):
                self._obs[t] = observations
                output = self._module.forward_exploration({"obs": torch.from_numpy(self._obs[t])})
                self._actions[t] = actions = output["actions"].numpy()
                self._values[t] = output["vf_preds"].numpy()
                observations, self._rewards[t], self._terminateds[t], self._truncateds[t], _ = self._env.step(actions)
        self._last = observations
        return FRAGMENT_LENGTH


def measure(sizes: Sizes, slots: tuple[int, ...] = SLOTS) -> list[Record]:
    """A line for each number of slots."""
    return [_measured(count, sizes) for count in slots]


def _measured(slots: int, sizes: Sizes) -> Record:
    bare = BareLoop(slots)
    with Rollout(NoopEnv(slots), module=Noop(slots), fragment_length=FRAGMENT_LENGTH, seed=0) as rollout:
        fragments = iter(rollout.fragments())

        def ours() -> int:
            next(fragments)
            return FRAGMENT_LENGTH

        pairs = [
            (steps_per_s(ours, sizes.seconds), steps_per_s(bare.fragment, sizes.seconds))
            for _ in range(sizes.rounds + 1)
        ]
    del pairs[0]  # to warm up
    own_us = statistics.median((1 / mine - 1 / other) * 1e6 for mine, other in pairs)
    allowed = [(mine, 1 / (1 / other + ALLOWED_US * 1e-6)) for mine, other in pairs]
    told: Any = {"own_us": round(own_us, 1), "beside_name": f"bare loop, {ALLOWED_US:g} µs slower"}
    return record("vector steps that do nothing", slots, allowed, aim=1.0, **told)


if __name__ == "__main__":
    run(measure)
