"""Module without a network that acts at random."""

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray

from rollflow.nodes.modules.distribution import ACTION_MASK, joined_mask
from rollflow.nodes.modules.rl_module import Batch, RLModule
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ModuleError
from rollflow.stream.data.tree import leaves_of


class RandomModule(RLModule):
    """Chooses every action with the same probability: a first opponent, and a baseline to compare with.

        Discrete, MultiDiscrete    `action_dist_inputs` f32[B, D], all 0; with `explore=False` the first action is taken
        bounded Box                `actions`, space's dtype[B, *shape], drawn uniformly whatever `explore` says

    If observations are a Dict space with `action_mask`, as in PettingZoo's classic games, an action whose mask is 0 is
    never chosen; for MultiDiscrete the mask has the parts end to end, or is a tuple of them. Raises ModuleError for
    other action spaces.
    """

    def setup(self) -> None:
        """Make the generator of Box actions, which `seed` replaces."""
        self._rng = np.random.default_rng()

    def seed(self, seed: int) -> None:
        """Seed the generator; a rollout calls this with a seed of its own and the module's id."""
        self._rng = np.random.default_rng(seed)

    def _forward(self, batch: Batch, **kwargs: Any) -> Batch:
        observations, space = batch[Columns.OBS], self.action_space
        leaf = leaves_of(observations)[0]
        if isinstance(space, gym.spaces.Discrete | gym.spaces.MultiDiscrete):
            count = int(space.n) if isinstance(space, gym.spaces.Discrete) else int(space.nvec.sum())
            logits = torch.zeros((len(leaf), count), device=leaf.device)
            if isinstance(observations, dict) and ACTION_MASK in observations:
                logits = logits.masked_fill(joined_mask(observations[ACTION_MASK]) == 0, -torch.inf)
            return {Columns.ACTION_DIST_INPUTS: logits}
        if isinstance(space, gym.spaces.Box) and space.is_bounded():
            return {Columns.ACTIONS: torch.from_numpy(self._drawn(space, len(leaf))).to(leaf.device)}
        raise ModuleError(
            f"RandomModule has no random actions for {space}, expected Discrete, MultiDiscrete or a bounded Box"
        )

    def _drawn(self, space: gym.spaces.Box, count: int) -> NDArray[Any]:
        shape = (count, *space.shape)
        if space.dtype.kind == "f":
            return self._rng.uniform(space.low, space.high, shape).astype(space.dtype)
        low, high = space.low.astype(np.int64), space.high.astype(np.int64)
        return self._rng.integers(low, high, shape, endpoint=True).astype(space.dtype)
