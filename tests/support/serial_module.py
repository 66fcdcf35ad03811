"""A module that keeps every forward pass it does, and whose outputs tell which of them made them."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from numbered_agents import NUM_ACTIONS

from rollflow import RLModule


class Pass(NamedTuple):
    """One forward pass of K agents: the weight it was done with, and the numbers of their observations, i64[K, 5]."""

    weight: float
    at: list[list[int]]


class Passes:
    """The forward passes of a module and of all its copies."""

    def __init__(self) -> None:
        self.done: list[Pass] = []

    def __deepcopy__(self, memo: Any) -> "Passes":
        return self

    def __iter__(self) -> Iterator[Pass]:
        return iter(self.done)


class SerialModule(RLModule):
    """Logits that follow from the observation; `serial` is the number of the pass, `weight` the parameter's value.

    A test sets the weight to the version that it publishes. `shift` makes modules differ.
    """

    def __init__(self, shift: float = 0.0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.shift = shift
        self.passes = Passes()

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        at = at_of(batch["obs"])
        self.passes.done.append(Pass(float(self.weight), at.to(torch.int64).tolist()))
        serial = torch.full((len(at),), len(self.passes.done) - 1)
        kept = {"seen": at, "weight": self.weight.detach().expand(len(at)), "serial": serial}
        return {"action_dist_inputs": logits_of(at, self.shift), "vf_preds": at[:, 4].float(), **kept}


class BreakingModule(SerialModule):
    """Raises in its pass of this number, from 0 on, and in those after it."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        if len(self.passes.done) >= self.at:
            raise ZeroDivisionError("no more")
        return super()._forward(batch)


def at_of(observations: Any) -> Any:
    """The numbers (slot, agent, episode, env step, agent step) of observations."""
    return observations["at"] if isinstance(observations, dict) else observations


def logits_of(at: torch.Tensor, shift: float = 0.0) -> torch.Tensor:
    """f32[..., 7] from numbers i64[..., 5]."""
    return torch.sin(at.float().sum(-1, keepdim=True) + torch.arange(NUM_ACTIONS) + shift)
