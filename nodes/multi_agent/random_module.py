"""A module that is no network: it acts at random."""

from typing import Any

import gymnasium as gym
import numpy as np
import torch

from rollflow.nodes.rl_module import Batch, RLModule
from rollflow.stream.columns import Columns
from rollflow.stream.errors import ModuleError
from rollflow.stream.tree import leaves_of


class RandomModule(RLModule):
    """Chooses every action with the same probability: the opponent to begin with, and the one to be compared with.

    For Discrete and MultiDiscrete actions, by logits that are all 0; with `explore=False`, by which nothing is sampled,
    that is the first of them. Where observations are a Dict space that has `action_mask`, as those of PettingZoo's
    classic games, an action whose mask is 0 is never chosen. Bounded Box actions are drawn uniformly, by torch's own
    generator. Raises ModuleError for other action spaces.
    """

    def _forward(self, batch: Batch, **kwargs: Any) -> Batch:
        observations, space = batch[Columns.OBS], self.action_space
        leaf = leaves_of(observations)[0]
        if isinstance(space, gym.spaces.Discrete | gym.spaces.MultiDiscrete):
            count = int(space.n) if isinstance(space, gym.spaces.Discrete) else int(space.nvec.sum())
            logits = torch.zeros((len(leaf), count), device=leaf.device)
            if isinstance(observations, dict) and "action_mask" in observations:
                logits[observations["action_mask"] == 0] = -torch.inf
            return {Columns.ACTION_DIST_INPUTS: logits}
        if isinstance(space, gym.spaces.Box) and space.is_bounded():
            low, high = (torch.from_numpy(np.asarray(bound)).to(leaf.device) for bound in (space.low, space.high))
            return {Columns.ACTIONS: low + (high - low) * torch.rand((len(leaf), *space.shape), device=leaf.device)}
        raise ModuleError(
            f"RandomModule has no random actions for {space}, expected Discrete, MultiDiscrete or a bounded Box"
        )
