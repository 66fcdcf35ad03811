"""The loop that somebody would write by hand, and what it is made of."""

import warnings
from functools import partial
from multiprocessing import get_context
from time import perf_counter
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from torch import nn

from benchmarks.policies import sampled

FRAGMENT_LENGTH = 128


class Act(nn.Module):
    """A forward pass and sampling: observations to actions, their log-probabilities and values."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self._policy = policy

    def forward(self, observations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One act step."""
        output = self._policy._forward({"obs": observations})
        return *sampled(output["action_dist_inputs"]), output["vf_preds"]


class Loop:
    """Steps, passes forward without gradients, samples, writes everything into preallocated columns.

    Makes one flat batch of tensors every 128 steps.

    is_traced    whether the pass and the sampling are traced and frozen by torch.jit
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], policy: Any, *, is_traced: bool = False) -> None:
        self._env = env
        act = Act(policy)
        self._act: Any = act.forward
        if is_traced:
            seen = torch.from_numpy(np.zeros_like(env.reset(seed=0)[0]))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # people have such loops all the same
                self._act = torch.jit.freeze(torch.jit.trace(act.eval(), seen, check_trace=False))
        # In gymnasium's NEXT_STEP mode the step after an end only resets.
        self._resets_next_step = env.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
        shape, space = (FRAGMENT_LENGTH, env.num_envs), env.single_observation_space
        self._columns = {
            "obs": np.empty((*shape, *(space.shape or ())), space.dtype),
            "actions": np.empty(shape, np.int64),
            "rewards": np.empty(shape, np.float32),
            "terminateds": np.empty(shape, np.bool_),
            "truncateds": np.empty(shape, np.bool_),
            "logp": np.empty(shape, np.float32),
            "values": np.empty(shape, np.float32),
        }
        self._valid = np.ones(shape, np.bool_)
        self._done = np.zeros(env.num_envs, np.bool_)
        self._last, _ = env.reset(seed=0)
        self.batch: dict[str, torch.Tensor] = {}

    def fragment(self) -> int:
        """One fragment and its batch; how many transitions it has."""
        obs, actions, rewards, terminateds, truncateds, logps, values = self._columns.values()
        observations = self._last
        with torch.no_grad():
            for t in range(FRAGMENT_LENGTH):
                obs[t] = observations
                chosen, logp, value = self._act(torch.from_numpy(obs[t]))
                actions[t] = acted = chosen.numpy()
                observations, rewards[t], terminateds[t], truncateds[t], _ = self._env.step(acted)
                logps[t], values[t] = logp.numpy(), value.numpy()
                if self._resets_next_step:
                    self._valid[t] = ~self._done
                    self._done = terminateds[t] | truncateds[t]
        self._last = observations
        self.batch = {
            name: torch.from_numpy(np.ascontiguousarray(column.swapaxes(0, 1))).flatten(0, 1)
            for name, column in self._columns.items()
        }
        return int(self._valid.sum())


class Forward:
    """Forward passes over the same observations again and again, with sampling, and nothing else."""

    def __init__(self, policy: Any, space: gym.Space[Any], slots: int) -> None:
        self._policy = policy
        self._obs = torch.from_numpy(np.stack([space.sample() for _ in range(slots)]))

    def fragment(self) -> int:
        """As many passes as a fragment has."""
        with torch.no_grad():
            for _ in range(FRAGMENT_LENGTH):
                sampled(self._policy._forward({"obs": self._obs})["action_dist_inputs"])
        return FRAGMENT_LENGTH * len(self._obs)


def side_by_side(env: Any, slots: int) -> SyncVectorEnv:
    """Environments as gymnasium makes them of an id, or a callable does, stepped by `SyncVectorEnv` without copies."""
    make = partial(gym.make, env) if isinstance(env, str) else env
    return SyncVectorEnv([make] * slots, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)


def loops_side_by_side(env: Any, policy: Any, slots: int, *, copies: int, seconds: float) -> float:
    """Steps per second of some loops, a process each with its share of the slots, all at work at the same time."""
    context = get_context("spawn")
    barrier, rates = context.Barrier(copies), context.Queue()
    processes = [
        context.Process(target=_measure_loop, args=(env, policy, slots // copies, seconds, barrier, rates))
        for _ in range(copies)
    ]
    for process in processes:
        process.start()
    total = sum(rates.get() for _ in processes)
    for process in processes:
        process.join()
    return float(total)


def _measure_loop(env: Any, policy: Any, slots: int, seconds: float, barrier: Any, rates: Any) -> None:
    torch.set_num_threads(1)
    loop = Loop(side_by_side(env, slots), policy())
    loop.fragment()
    barrier.wait()
    steps, began = 0, perf_counter()
    while perf_counter() - began < seconds:
        steps += loop.fragment()
    rates.put(steps / (perf_counter() - began))
