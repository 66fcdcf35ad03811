"""A module whose output says what it saw of an environment that numbers its own steps."""

from typing import Any

import torch
from numbered_env import NUM_ACTIONS, NumberedEnv, numbered_envs

from rollflow import RLModule

__all__ = ["NUM_ACTIONS", "NumberedEnv", "NumberedModule", "logits_of", "numbered_envs"]


class NumberedModule(RLModule):
    """Logits and outputs that follow from the observation and from one weight, so that each can be checked.

    `seen` repeats the observation, `weight` the parameter, which a test sets to the version it publishes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        obs = batch["obs"]
        at = obs["at"] if isinstance(obs, dict) else obs
        weight = self.weight.detach().expand(len(at))
        logits = logits_of(at.float())
        return {"action_dist_inputs": logits, "vf_preds": at[:, 2].float(), "seen": at, "weight": weight}


class WideModule(NumberedModule):
    """With `more` parameters, so many numbers."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.more = torch.nn.Parameter(torch.zeros(size))


def logits_of(at: torch.Tensor) -> torch.Tensor:
    """f32[..., 7] from observations f32[..., 3]."""
    return torch.sin(at.sum(-1, keepdim=True) + torch.arange(NUM_ACTIONS))
