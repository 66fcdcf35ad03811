"""What the engine itself costs per vector step: an environment and a module that do nothing, beside a bare loop.

Both run in one process and in turn, so that a machine whose speed drifts slows both. The bare loop calls the same
environment and the same module and writes the same rows into preallocated arrays; what rollflow takes longer is
its own cost: connector pipelines, episodes, counters, backpressure. Prints one JSON line for each number of slots and
a table of the medians.

    python benchmarks/overhead.py [--quick]
"""

import json
import statistics
import sys
import time
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv

from rollflow.nodes import RLModule, Rollout

SLOTS = (1, 8, 64, 1024)
FRAGMENT_LENGTH = 128
QUICK = "--quick" in sys.argv
ROUNDS, FRAGMENTS = (5, 4) if QUICK else (15, 16)


class NoopEnv(VectorEnv[Any, Any, Any]):
    """Gives the same arrays at every step; no episode ever ends."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.single_observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
        self.single_action_space = gym.spaces.Discrete(2)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)
        self._answer = (
            np.zeros((num_envs, 4), np.float32),
            np.zeros(num_envs, np.float64),
            np.zeros(num_envs, np.bool_),
            np.zeros(num_envs, np.bool_),
            {},
        )

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self._answer[0], {}

    def step(self, actions: Any) -> Any:
        return self._answer


class NoopModule(RLModule):
    """Gives the same actions and values at every call."""

    def __init__(self, num_envs: int) -> None:
        super().__init__()
        self._num_envs = num_envs
        self._output = {"actions": torch.zeros(num_envs, dtype=torch.int64), "vf_preds": torch.zeros(num_envs)}

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return dict(self._output)


class BareLoop:
    """The loop that somebody would write by hand."""

    def __init__(self, num_envs: int) -> None:
        self._env, self._module = NoopEnv(num_envs), NoopModule(num_envs)
        shape = (FRAGMENT_LENGTH, num_envs)
        self._obs = np.empty((*shape, 4), np.float32)
        self._actions, self._values = np.empty(shape, np.int64), np.empty(shape, np.float32)
        self._rewards = np.empty(shape, np.float32)
        self._terminateds, self._truncateds = np.empty(shape, np.bool_), np.empty(shape, np.bool_)
        self._last, _ = self._env.reset()

    def fragment(self) -> None:
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


def microseconds_per_step(fragment: Any) -> float:
    """Wall time of one vector step, over FRAGMENTS fragments."""
    began = time.perf_counter()
    for _ in range(FRAGMENTS):
        fragment()
    return (time.perf_counter() - began) / (FRAGMENTS * FRAGMENT_LENGTH) * 1e6


def measure(num_envs: int) -> dict[str, Any]:
    """Medians over ROUNDS pairs of runs."""
    loop = BareLoop(num_envs)
    with Rollout(NoopEnv(num_envs), module=NoopModule(num_envs), fragment_length=FRAGMENT_LENGTH, seed=0) as rollout:
        fragments = iter(rollout.fragments())
        runs = [loop.fragment, lambda: next(fragments)]
        for run in runs:
            microseconds_per_step(run)  # warm up
        pairs = [[microseconds_per_step(run) for run in runs] for _ in range(ROUNDS)]
    bare, ours = (statistics.median(column) for column in zip(*pairs, strict=True))
    own = statistics.median(pair[1] - pair[0] for pair in pairs)
    return {
        "workload": "overhead",
        "slots": num_envs,
        "bare_us": round(bare, 2),
        "rollflow_us": round(ours, 2),
        "own_us": round(own, 2),
        "aim_us": 25.0,
        "runs": ROUNDS,
    }


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    results = [measure(slots) for slots in SLOTS]
    for result in results:
        print(json.dumps(result))
    print(f"\n{'slots':>6} {'bare loop':>12} {'rollflow':>12} {'own cost':>12}   per vector step")
    for result in results:
        columns = (f"{result[key]:>9.1f} µs" for key in ("bare_us", "rollflow_us", "own_us"))
        print(f"{result['slots']:>6} {' '.join(columns)}")


if __name__ == "__main__":
    main()
