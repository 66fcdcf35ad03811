"""The networks that are measured with."""

from typing import Any

import torch
from torch import nn

from rollflow import RLModule


class Mlp(RLModule):
    """Two layers of 64, for two actions and a value."""

    def setup(self) -> None:
        self.trunk = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.logits, self.value = nn.Linear(64, 2), nn.Linear(64, 1)

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        hidden = self.trunk(batch["obs"])
        return {"action_dist_inputs": self.logits(hidden), "vf_preds": self.value(hidden).squeeze(-1)}


class NatureCnn(RLModule):
    """The network of the Nature paper on DQN, over bytes with the channels last, for 18 actions and a value."""

    def setup(self) -> None:
        self.trunk = nn.Sequential(
            nn.Conv2d(4, 32, 8, 4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, 2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, 1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(3136, 512),
            nn.ReLU(),
        )
        self.logits, self.value = nn.Linear(512, 18), nn.Linear(512, 1)

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        hidden = self.trunk(batch["obs"].permute(0, 3, 1, 2).float() / 255)
        return {"action_dist_inputs": self.logits(hidden), "vf_preds": self.value(hidden).squeeze(-1)}


class Noop(RLModule):
    """Gives the same actions and values at every call."""

    def __init__(self, num_envs: int) -> None:
        super().__init__()
        self._output = {"actions": torch.zeros(num_envs, dtype=torch.int64), "vf_preds": torch.zeros(num_envs)}

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return dict(self._output)


class Zeros(RLModule):
    """Gives zeros for as many slots as there are, also where it is copied to lanes that have a part of them."""

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        count = len(batch["obs"])
        return {"actions": torch.zeros(count, dtype=torch.int64), "vf_preds": torch.zeros(count)}


def sampled(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Actions and their log-probabilities, by a race of exponentials: in a third of the time of torch.distributions."""
    log_probs = torch.log_softmax(logits, -1)
    actions = (log_probs.exp() / torch.empty_like(log_probs).exponential_()).argmax(-1)
    return actions, log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
