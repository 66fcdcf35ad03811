"""Masks of actions: how a module says which actions are ruled out, and how those that choose know it.

A logit of `RULED_OUT` or less rules its action out: -inf, the least finite float, and -1e9, which is often written.
"""

from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor

from rollflow.nodes.modules.distribution import places_of_inputs
from rollflow.stream.data.columns import RULED_OUT
from rollflow.stream.data.tree import Tree, leaves_of

ACTION_MASK = "action_mask"  # in a Dict of observations


def mask_logits(logits: Tensor, mask: Tree) -> Tensor:
    """Logits float[..., n] with those replaced that `mask` rules out, for Discrete and MultiDiscrete actions.

        mask    number or bool [..., n], 0 for an action that is ruled out; or a tuple of such parts, end to end

    They become the least finite float, so that losses stay finite; of float16 -inf. Observations without any action
    left, as in padded rows, may be learnt from: acting is what they are refused for.
    """
    least = torch.finfo(logits.dtype).min
    return logits.masked_fill(joined_mask(mask) == 0, least if least <= RULED_OUT else -torch.inf)


def joined_mask(mask: Tree) -> Tensor:
    """A mask [..., n] of its parts."""
    if isinstance(mask, Tensor):
        return mask
    joined: Tensor = torch.cat([torch.as_tensor(part) for part in leaves_of(mask)], -1)
    return joined


def mask_width(space: gym.Space[Any]) -> int | None:
    """Numbers in a mask, of a space of one axis, or of a Tuple of such; None for another space."""
    if isinstance(space, spaces.Tuple):
        widths = [mask_width(part) for part in space]
        return None if None in widths else sum(width for width in widths if width is not None)
    return space.shape[0] if space.shape is not None and len(space.shape) == 1 else None


def without_choice(rows: NDArray[Any], space: gym.Space[Any] | None) -> NDArray[np.bool_]:
    """The rows, bool[N], of logits float[N, D] that rule out every action; for no space those of -inf alone."""
    rows = rows.astype(np.float64)  # of which float16 has no `RULED_OUT`
    ruled_out: NDArray[np.bool_] = rows.max(1) == -np.inf
    for begin, end in () if space is None else _choices(space):
        ruled_out = ruled_out | (rows[:, begin:end].max(1) <= RULED_OUT)
    return ruled_out


def _choices(space: gym.Space[Any]) -> Iterator[tuple[int, int]]:
    """Where the logits of each number of Discrete and MultiDiscrete actions begin and end, parts of others included."""
    for part, begin in places_of_inputs(space):
        sizes = [part.n] if isinstance(part, spaces.Discrete) else []
        if isinstance(part, spaces.MultiDiscrete):
            sizes = part.nvec.reshape(-1).tolist()
        for size in sizes:
            yield begin, begin + int(size)
            begin += int(size)
