"""Discounts: what a later reward counts for now."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def discounted_sums(values: Floats, discounts: Floats, lengths: NDArray[np.int64]) -> Floats:
    """Each step's value and the discounted sum from the next one on; a chunk's last step has its value alone.

        values       f32[B]  of all chunks' steps, end to end
        discounts    f32[B]  what the sum from step t + 1 on counts for at step t
        lengths      i64[C]  steps of each chunk, B in all
    Returns f32[B].
    """
    sums = np.empty_like(values)
    by_length = np.argsort(-lengths, kind="stable")
    last = (np.cumsum(lengths) - 1)[by_length]
    carry = np.zeros(len(lengths), np.float32)
    # All chunks at once, from their last steps backwards: the longest ones come first, and stay when others are done.
    there = np.searchsorted(-lengths[by_length], -np.arange(lengths.max(initial=0)), side="left")
    for back, count in enumerate(there.tolist()):
        at = last[:count] - back
        carry[:count] = sums[at] = values[at] + discounts[at] * carry[:count]
    return sums
