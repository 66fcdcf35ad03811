"""Shared memory for what has to be copied to be lent."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollflow.sinks.trainer.layout import Layout
from rollflow.stream.blocks import BlockPool, SharedBlock

ALIGNMENT = 64  # of what is copied
_LEAST = 1 << 12  # bytes of a block


class Copies:
    """Blocks for copies; as many of a size as are in use at a time."""

    def __init__(self) -> None:
        self._pools: dict[int, BlockPool[SharedBlock]] = {}

    def of(self, rows: Sequence[Sequence[NDArray[Any]]], layout: Layout) -> tuple[SharedBlock, NDArray[np.uint8]]:
        """A block with a copy of each row's arrays, laid out, and the array that keeps it from being written again.

        rows    of arrays of the layout's kinds; each lies `layout.size` bytes behind the one before
        """
        size = max(_LEAST, 1 << (len(rows) * layout.size - 1).bit_length())
        if size not in self._pools:
            self._pools[size] = BlockPool(size, SharedBlock)
        index, root = self._pools[size].take()
        begin = 0
        for row in rows:
            for array, leaf in zip(row, layout.leaves, strict=True):
                np.copyto(np.ndarray(leaf.shape, leaf.dtype, root, begin + leaf.offset), array)
            begin += layout.size
        return self._pools[size].blocks[index], root
