"""Environments of tensors that number their own steps, in every form that `TorchEnvs` takes."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import VectorEnv
from hypothesis import given, strategies
from torch import Tensor

from rollflow import TorchEnvs
from rollflow.nodes import LambdaConnector

LENGTHS = (3, 1, 5, 2)  # of episodes: slot s's episode e has LENGTHS[(s + e) % 4] steps
NUM_ACTIONS = 2
OBSERVATIONS = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
ACTIONS = gym.spaces.Box(-np.inf, np.inf, (NUM_ACTIONS,), np.float32)

# A test is called with settings of a rollout and of its `NumberedTensors`.
drawn_rollouts = given(
    num_envs=strategies.integers(1, 5),
    lengths=strategies.lists(strategies.integers(1, 6), min_size=1, max_size=4).map(tuple),
    gives_final=strategies.booleans(),
    fragment_length=strategies.integers(1, 8),
    lookback=strategies.integers(0, 3),
    seed=strategies.integers(0, 99),
)


class NumberedTensors:
    """Plain object: observations are (slot, episode, step), f32[N, 3], and the reward is step + action[0] / 8.

    Every other episode of a slot is truncated. Nothing is read from the device.

    num_envs, device    N, and where
    lengths             of episodes, in turn
    gives_final         True: infos have "final_obs" in steps with ends
    """

    observation_space, action_space = OBSERVATIONS, ACTIONS

    def __init__(
        self, num_envs: int, device: Any = "cpu", *, lengths: tuple[int, ...] = LENGTHS, gives_final: bool = False
    ) -> None:
        self.num_envs, self.device, self.gives_final = num_envs, torch.device(device), gives_final
        self.lengths = lengths
        self._lengths = torch.tensor(lengths, device=device)
        self._slots = torch.arange(num_envs, device=device)
        self._schedule: Iterator[bool] = iter(())
        self.actions: list[Tensor] = []  # all that came, copied
        self.is_closed = False

    def reset(self, *, seed: int | None = None) -> Tensor:
        """Begin the first episode of every slot; which numbers it has follows from the seed."""
        self.episode = torch.full_like(self._slots, 0 if seed is None else seed % 8)
        self.t = torch.zeros_like(self._slots)
        self._schedule = _steps_with_ends(self.num_envs, self.lengths, 0 if seed is None else seed % 8)
        return self.look()

    def look(self) -> Tensor:
        """The observations there are now."""
        return torch.stack([self._slots, self.episode, self.t], dim=1).float()

    def lengths_now(self) -> Tensor:
        """Lengths of the episodes that there are now."""
        return self._lengths[(self._slots + self.episode) % len(self.lengths)]

    def advance(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, bool]:
        """The values of a step, last observations, and whether an episode ended."""
        self.actions.append(actions.clone())
        self.t = self.t + 1
        rewards = self.t + actions[:, 0] / 8
        done = self.t == self.lengths_now()
        truncated = done & (self.episode % 2 == 1)
        last = self.look()
        self.episode, self.t = self.episode + done, self.t * ~done
        return self.look(), rewards, done & ~truncated, truncated, last, next(self._schedule)

    def step(self, actions: Tensor) -> tuple[Any, ...]:
        """Gymnasium's five values."""
        *values, last, has_ends = self.advance(actions)
        return (*values, {"final_obs": last} if has_ends and self.gives_final else {})

    def close(self) -> None:
        self.is_closed = True


def _steps_with_ends(num_envs: int, lengths: tuple[int, ...], first: int) -> Iterator[bool]:
    """Whether an episode ends in each step in turn, worked out without the device."""
    left = [lengths[(slot + first) % len(lengths)] for slot in range(num_envs)]
    episodes = [first] * num_envs
    while True:
        left = [steps - 1 for steps in left]
        yield 0 in left
        for slot, steps in enumerate(left):
            if steps == 0:
                episodes[slot] += 1
                left[slot] = lengths[(slot + episodes[slot]) % len(lengths)]


def of_arrays(env: Any) -> Any:
    """A piece that has no form for tensors, and does nothing: a rollout with it is one of arrays."""
    return LambdaConnector(lambda batch: None, columnar=True, changes_episodes=False)


class Groups:
    """What a TensorDict has of a dict: `items` and keys, and it is no Mapping."""

    def __init__(self, **groups: Tensor) -> None:
        self._groups = groups

    def items(self) -> Any:
        return self._groups.items()


class RslRlEnv:
    """rsl_rl's `VecEnv` over numbered tensors: it writes over its buffers, has groups, and dones of i64.

    time_outs    "given", "missing", or "more": with ones where no episode ends
    form         "groups", or of older versions: "pair" and "tensor"
    """

    def __init__(self, numbered: NumberedTensors, *, time_outs: str = "given", form: str = "groups") -> None:
        self.numbered, self.time_outs, self.form = numbered, time_outs, form
        self.num_envs, self.device, self.num_actions = numbered.num_envs, numbered.device, NUM_ACTIONS
        numbered.reset()
        self._obs = numbered.look()
        self._rewards = torch.zeros(self.num_envs, device=self.device)
        self._dones = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        self._time_outs = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)

    def seed(self, seed: int) -> None:
        self.numbered.reset(seed=seed)
        self._obs.copy_(self.numbered.look())

    def reset(self) -> Any:
        raise AssertionError("reset makes a step")

    def get_observations(self) -> Any:
        return (self._obs, self._extras()) if self.form == "pair" else self._observations()

    def step(self, actions: Tensor) -> tuple[Any, ...]:
        observations, rewards, terminated, truncated, _, _ = self.numbered.advance(actions)
        self._obs.copy_(observations)
        self._rewards.copy_(rewards)
        self._dones.copy_(terminated | truncated)
        self._time_outs.copy_(truncated | ~terminated if self.time_outs == "more" else truncated)
        extras = self._extras() | ({} if self.time_outs == "missing" else {"time_outs": self._time_outs})
        return self._observations(), self._rewards, self._dones, extras

    def _extras(self) -> dict[str, Any]:
        log: dict[str, Any] = {"log": {"steps": 1}}
        return log | {"observations": {"critic": self._obs * 2}} if self.form == "pair" else log

    def _observations(self) -> Any:
        return Groups(policy=self._obs, critic=self._obs * 2) if self.form == "groups" else self._obs


class ManiSkillEnv(VectorEnv[Any, Any, Any]):
    """gymnasium's vector environment over numbered tensors, as ManiSkill has it."""

    single_observation_space, single_action_space = OBSERVATIONS, ACTIONS

    def __init__(self, numbered: NumberedTensors) -> None:
        self.numbered, self.num_envs, self.device = numbered, numbered.num_envs, numbered.device

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self.numbered.reset(seed=seed), {}

    def step(self, actions: Any) -> Any:
        *values, last, has_ends = self.numbered.advance(actions)
        return (*values, {"final_observation": last, "elapsed_steps": self.numbered.t} if has_ends else {})


class VmasEnv:
    """VMAS's `Environment` over numbered tensors: lists of what its agents have, no reset of itself, in-place writers.

    The agents of an environment see the same numbers, and are rewarded for their own actions.
    """

    terminated_truncated, max_steps, n_agents = True, 9, 2

    def __init__(self, numbered: NumberedTensors, *, spaces: Any = (OBSERVATIONS, OBSERVATIONS)) -> None:
        self.numbered, self.num_envs, self.device = numbered, numbered.num_envs, numbered.device
        self.agents = [SimpleNamespace(name=f"agent_{number}") for number in range(self.n_agents)]
        self.observation_space, self.action_space = gym.spaces.Tuple(spaces), gym.spaces.Tuple([ACTIONS, ACTIONS])

    def reset(self, *, seed: int | None = None) -> list[Tensor]:
        numbered = self.numbered
        if seed is None:
            numbered.episode, numbered.t = numbered.episode + 1, numbered.t * 0
        else:
            numbered.reset(seed=seed)
        return self._look()

    def reset_at(self, index: int, *, return_observations: bool) -> None:
        self.numbered.episode[index] += 1
        self.numbered.t[index] = 0

    def get_from_scenario(self, *, get_observations: bool, **others: bool) -> list[Any]:
        assert not any(others.values())
        return [self._look()]

    def step(self, actions: list[Tensor]) -> tuple[Any, ...]:
        now = self.numbered
        now.actions.append(torch.stack(actions, 1).flatten(0, 1))
        now.t = now.t + 1
        rewards = [now.t + each[:, 0] / 8 for each in actions]
        for each in actions:
            each.zero_()
        done, is_odd = now.t == now.lengths_now(), now.episode % 2 == 1
        return self._look(), rewards, done & ~is_odd, done & is_odd, [{"t": now.t}, {"t": now.t}]

    def _look(self) -> list[Tensor]:
        return [self.numbered.look(), self.numbered.look()]


# What an environment of numbers is in each form, made with keywords of `TorchEnvs`.
FORMS: dict[str, Callable[..., TorchEnvs]] = {
    "plain": lambda numbered, **how: TorchEnvs(numbered, observation_space=OBSERVATIONS, action_space=ACTIONS, **how),
    "VectorEnv": lambda numbered, **how: TorchEnvs(ManiSkillEnv(numbered), **how),
    "rsl_rl": lambda numbered, **how: TorchEnvs(RslRlEnv(numbered), group="policy", **how),
    "rsl_rl with groups": lambda numbered, **how: TorchEnvs(RslRlEnv(numbered), **how),
    "rsl_rl without groups": lambda numbered, **how: TorchEnvs(RslRlEnv(numbered, form="tensor"), **how),
    "rsl_rl in pairs": lambda numbered, **how: TorchEnvs(RslRlEnv(numbered, form="pair"), group="policy", **how),
}
VMAS: dict[str, Callable[..., TorchEnvs]] = {  # whose flags are read in each step
    "VMAS": lambda numbered, **how: TorchEnvs(VmasEnv(numbered), **how)
}
