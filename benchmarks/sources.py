"""Environments of others, and nested observations, each beside the loop that somebody would write by hand over them.

A source whose package is not installed is left out, and named. The module is one of its user's own, without options.

    python -m benchmarks.sources [--quick]
"""

import importlib.util
import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from torch import nn

from benchmarks.command import run
from benchmarks.loop import FRAGMENT_LENGTH, side_by_side
from benchmarks.pairs import Record, Sizes, paired
from benchmarks.policies import sampled
from rollflow import RLModule, Rollout

LEAVES = 10


class NestedEnv(VectorEnv[Any, Any, Any]):
    """Gives the same dict of ten arrays at every step; no episode ever ends."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        leaf = gym.spaces.Box(-1, 1, (4,), np.float32)
        self.single_observation_space = gym.spaces.Dict({f"part_{i}": leaf for i in range(LEAVES)})
        self.single_action_space = gym.spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._observations = {name: np.zeros((num_envs, 4), np.float32) for name in self.single_observation_space}
        self._rewards, self._flags = np.zeros(num_envs, np.float32), np.zeros(num_envs, np.bool_)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self._observations, {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        return self._observations, self._rewards, self._flags, self._flags, {}


class SmallMlp(RLModule):
    """A layer of 64 over all numbers of an observation; action distribution inputs, and a value."""

    def setup(self) -> None:
        count = gym.spaces.flatdim(self.observation_space)
        outputs = self.action_space.n if isinstance(self.action_space, gym.spaces.Discrete) else 0
        self.trunk = nn.Sequential(nn.Linear(count, 64), nn.Tanh())
        self.inputs = nn.Linear(64, int(outputs or 2 * self.action_space.shape[0]))
        self.value = nn.Linear(64, 1)

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        observations = batch["obs"]
        joined = torch.cat([*observations.values()], -1) if isinstance(observations, dict) else observations
        hidden = self.trunk(joined.flatten(1).float())
        return {"action_dist_inputs": self.inputs(hidden), "vf_preds": self.value(hidden).squeeze(-1)}


class SourceLoop:
    """The loop for observations of one array or a dict of them, and for discrete or continuous actions.

    Under NEXT_STEP autoreset the step after an end is no transition: a mask says so, as in `Loop`.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], policy: Any) -> None:
        self._env, self._policy = env, policy
        space, actions = env.single_observation_space, env.single_action_space
        shape = FRAGMENT_LENGTH, env.num_envs
        empty: Callable[[Any, Any], Any] = lambda each, dtype: np.empty((*shape, *each), dtype)  # noqa: E731
        self._nested = isinstance(space, gym.spaces.Dict)
        parts = space.spaces if isinstance(space, gym.spaces.Dict) else {"": space}
        self._obs = {name: empty(part.shape, part.dtype) for name, part in parts.items()}
        self._is_continuous = isinstance(actions, gym.spaces.Box)
        self._actions = empty(actions.shape, np.float32 if self._is_continuous else np.int64)
        self._inputs = empty(policy.inputs.bias.shape, np.float32)
        self._logp, self._values, self._rewards = (empty((), np.float32) for _ in range(3))
        self._terminateds, self._truncateds = empty((), np.bool_), empty((), np.bool_)
        self._resets_next_step = env.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
        self._valid, self._done = np.ones(shape, np.bool_), np.zeros(env.num_envs, np.bool_)
        self._last, _ = env.reset(seed=0)
        self.batch: dict[str, Any] = {}

    def fragment(self) -> int:
        """One fragment and its batch; how many transitions it has."""
        observations = self._last
        with torch.no_grad():
            for t in range(FRAGMENT_LENGTH):
                if self._nested:
                    for name, column in self._obs.items():
                        column[t] = observations[name]
                    seen: Any = {name: torch.from_numpy(column[t]) for name, column in self._obs.items()}
                else:
                    self._obs[""][t] = observations
                    seen = torch.from_numpy(self._obs[""][t])
                output = self._policy._forward({"obs": seen})
                inputs = output["action_dist_inputs"]
                chosen, logp = gaussian(inputs) if self._is_continuous else sampled(inputs)
                self._actions[t] = acted = chosen.numpy()
                self._inputs[t] = inputs.numpy()
                answer = self._env.step(acted)
                observations, self._rewards[t], self._terminateds[t], self._truncateds[t], _ = answer
                self._logp[t], self._values[t] = logp.numpy(), output["vf_preds"].numpy()
                if self._resets_next_step:
                    self._valid[t] = ~self._done
                    self._done = self._terminateds[t] | self._truncateds[t]
        self._last = observations
        columns = {**self._obs, "actions": self._actions, "inputs": self._inputs, "logp": self._logp}
        columns |= {"values": self._values, "rewards": self._rewards}
        columns |= {"terminateds": self._terminateds, "truncateds": self._truncateds}
        self.batch = {
            name: torch.from_numpy(np.ascontiguousarray(column.swapaxes(0, 1))).flatten(0, 1)
            for name, column in columns.items()
        }
        return int(self._valid.sum())


class AsyncLoop:
    """The loop over a pool that answers for whichever are ready: `recv`, a pass, `send`; rows as they come."""

    def __init__(self, pool: Any, policy: Any) -> None:
        self._pool, self._policy, self._size = pool, policy, pool.config["batch_size"]
        self._turns = FRAGMENT_LENGTH * pool.num_envs // self._size
        space, actions = pool.single_observation_space, pool.single_action_space
        empty: Callable[[Any, Any], Any] = lambda each, dtype: np.empty((self._turns, self._size, *each), dtype)  # noqa: E731
        self._columns = {
            "obs": empty(space.shape, space.dtype),
            "actions": empty(actions.shape, np.int64),
            "inputs": empty(policy.inputs.bias.shape, np.float32),
            **{name: empty((), np.float32) for name in ("logp", "values", "rewards")},
            **{name: empty((), np.bool_) for name in ("terminateds", "truncateds")},
            "ids": empty((), np.int32),
            "valid": empty((), np.bool_),
        }
        self._done = np.zeros(pool.num_envs, np.bool_)
        self.batch: dict[str, Any] = {}
        pool.async_reset()

    def fragment(self) -> int:
        """One fragment and its batch; how many transitions it has."""
        columns = self._columns
        with torch.no_grad():
            for turn in range(self._turns):
                answer = self._pool.recv()
                columns["obs"][turn], columns["rewards"][turn] = answer[0], answer[1]
                columns["terminateds"][turn], columns["truncateds"][turn] = answer[2], answer[3]
                columns["ids"][turn] = ids = answer[4]["env_id"]
                columns["valid"][turn] = ~self._done[ids]
                self._done[ids] = answer[2] | answer[3]
                output = self._policy._forward({"obs": torch.from_numpy(columns["obs"][turn])})
                chosen, logp = sampled(output["action_dist_inputs"])
                columns["actions"][turn] = acted = chosen.numpy()
                self._pool.send(acted, ids)
                columns["inputs"][turn], columns["logp"][turn] = output["action_dist_inputs"].numpy(), logp.numpy()
                columns["values"][turn] = output["vf_preds"].numpy()
        self.batch = {name: torch.from_numpy(column.copy()).flatten(0, 1) for name, column in columns.items()}
        return int(columns["valid"].sum())


def gaussian(inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Actions of a diagonal Gaussian, of means and logarithms of deviations, and their log-probabilities."""
    means, logs = inputs.chunk(2, -1)
    noise = torch.randn_like(means)
    return means + logs.exp() * noise, (-0.5 * noise**2 - logs - 0.5 * math.log(2 * math.pi)).sum(-1)


def _envpool(slots: int) -> Any:
    import envpool

    return envpool.make("CartPole-v1", env_type="gymnasium", num_envs=slots)


def _envpool_async(slots: int) -> Any:
    import envpool

    return envpool.make("CartPole-v1", env_type="gymnasium", num_envs=slots, batch_size=slots // 4)


def _atari(slots: int) -> Any:
    from ale_py.vector_env import AtariVectorEnv

    return AtariVectorEnv("pong", num_envs=slots)


# Name, package, what the loop steps, slots. The rollout is given the same, but for MuJoCo: the environment's id.
SOURCES: tuple[tuple[str, str, Callable[[int], Any], tuple[int, ...]], ...] = (
    ("observations of ten arrays", "numpy", NestedEnv, (8, 64)),
    ("EnvPool, CartPole", "envpool", _envpool, (8, 64)),
    ("EnvPool, CartPole, a quarter ready", "envpool", _envpool_async, (64,)),
    ("ALE's vector form, Pong", "ale_py", _atari, (8,)),
    ("MuJoCo, HalfCheetah", "mujoco", partial(side_by_side, "HalfCheetah-v5"), (8,)),
)


def measure(sizes: Sizes) -> list[Record]:
    """Lines for each source that is installed."""
    lines = []
    for name, package, make, slots in SOURCES:
        if importlib.util.find_spec(package) is None:
            print(f"{name}: left out, {package} is not installed here", file=sys.stderr)
            continue
        lines += [_measured(name, make, count, sizes) for count in slots]
    return lines


def _measured(name: str, make: Callable[[int], Any], slots: int, sizes: Sizes) -> Record:
    options: Any = {"fragment_length": FRAGMENT_LENGTH, "seed": 0}
    ours: Any = make(slots) if make is not SOURCES[-1][2] else "HalfCheetah-v5"
    if isinstance(ours, str):
        options["num_envs"] = slots
    with Rollout(ours, module=SmallMlp, **options) as rollout:
        env = make(slots)
        policy = SmallMlp(env.single_observation_space, env.single_action_space)
        loop = AsyncLoop(env, policy) if make is _envpool_async else SourceLoop(env, policy)
        batches = iter(rollout.batches())
        return paired(name, slots, lambda: len(next(batches)["rewards"]), loop.fragment, aim=0.95, sizes=sizes)


if __name__ == "__main__":
    run(measure)
