"""An environment of tensors that draws random numbers, and says where it stands."""

from typing import Any

import gymnasium as gym
import numpy as np
import torch


class SilentTensorWalk:
    """N walks, each of which ends at a distance of 2, or is cut after 20 steps. Nobody can say where it stands.

    gives_final    whether last observations of ended episodes are given
    """

    single_observation_space = gym.spaces.Box(-9, 9, (2,), np.float32)
    single_action_space = gym.spaces.Discrete(2)

    def __init__(self, num_envs: int = 3, device: str = "cpu", *, gives_final: bool = True) -> None:
        self.num_envs, self.device, self.gives_final = num_envs, torch.device(device), gives_final
        self.generator = torch.Generator(device)

    def reset(self, *, seed: int | None = None) -> torch.Tensor:
        if seed is not None:
            self.generator.manual_seed(seed)
        self.count = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        self.at = self._drawn()
        return self.at.clone()

    def step(self, actions: torch.Tensor) -> tuple[Any, ...]:
        self.count += 1
        self.at += 0.3 * self._drawn() + 0.2 * (actions[:, None] - 0.5)
        terminated, truncated = self.at.norm(dim=1) > 2, self.count > 20
        last, done = self.at.clone(), terminated | truncated
        self.count *= ~done
        self.at = torch.where(done[:, None], self._drawn(), self.at)
        infos = {"final_obs": last} if self.gives_final else {}
        return self.at.clone(), last[:, 0].clone(), terminated, truncated & ~terminated, infos

    def _drawn(self) -> torch.Tensor:
        return torch.randn((self.num_envs, 2), generator=self.generator, device=self.device)


class TensorWalk(SilentTensorWalk):
    def get_state(self) -> dict[str, Any]:
        return {"at": self.at, "count": self.count, "drawn": self.generator.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        self.at, self.count = state["at"], state["count"]
        self.generator.set_state(state["drawn"])
