"""Fragments from one process to another, with their columns in memory that both see."""

import math
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollflow.nodes.offloaded.fragment_message import described, message_of_lane
from rollflow.stream import wire
from rollflow.stream.data.blocks import BlockPool, SharedBlock, address_of, block_under, root_of
from rollflow.stream.data.tree import Tree, leaves_of, map_tree
from rollflow.stream.fragments.lane import Lane
from rollflow.stream.multi_agent.multi_agent_fragment import AnyFragment, MultiAgentFragment
from rollflow.stream.multi_agent.multi_agent_lane import MultiAgentLane

Plain = dict[str, Any]
_ALIGNMENT = 64  # bytes
_LEAST = 12  # binary logarithm of a block's bytes


class FragmentWriter:
    """Tells another process where the fragments of a lane lie; those of private memory are copied.

    blocks    all that the other process is to see; one is written again once `free` says that it is done with it
    """

    def __init__(self, lane: Lane | MultiAgentLane) -> None:
        self.blocks: list[SharedBlock] = []
        self._lane = lane
        self._lent: dict[int, NDArray[np.uint8]] = {}  # by the index of the block
        self._pools: dict[int, BlockPool[SharedBlock]] = {}  # of blocks for copies, by size
        self._rows = -1  # in the columns whose places were told last; -1: they are in a block of copies

    def write(self, fragment: AnyFragment) -> tuple[int, Plain]:
        """The block that a fragment lies in, where it is put if it does not, and what else there is to say of it."""
        if (known := self._known(fragment)) is not None:
            index, root, fields = known
        else:
            message = message_of_lane(self._lane, 0, fragment, {})
            index, root, fields = self._placed(message.columns)
            fields |= {"rest": message.rest}
        self._lent[index] = root
        return index, fields

    def free(self, index: int) -> None:
        """The other process has no more use for a block."""
        self._lent.pop(index, None)

    def _known(self, fragment: AnyFragment) -> tuple[int, NDArray[np.uint8], Plain] | None:
        """Block of a fragment, its root, and all that is to be said where the rest was said last; None: it was not.

        Its columns are not looked at one by one: it takes a while, in the worker's thread.
        """
        lane = self._lane
        if isinstance(lane, MultiAgentLane) or isinstance(fragment, MultiAgentFragment):
            return None
        if self._rows != fragment.last_row:
            return None
        root = root_of(leaves_of(fragment.columns[min(fragment.columns)].tree)[0])
        block = block_under(root)
        if block not in self.blocks:
            return None
        return self.blocks.index(block), root, {"rest": described(fragment, lane.observation_spaces)}

    def _placed(self, columns: Tree) -> tuple[int, NDArray[np.uint8], Plain]:
        """The block that arrays lie in, what keeps it from being written again, and the places in it.

        The places are left out where they are those of the last fragment: all blocks of a lane are alike.
        """
        leaves = leaves_of(columns)
        rows, root = min(map(len, leaves)), root_of(leaves[0])
        block = block_under(root)
        if block is None:
            leaves, block, root = self._copied(leaves)
            rows = -1
        if block not in self.blocks:
            self.blocks.append(block)
        is_known, self._rows = rows >= 0 and self._rows == rows, rows
        if is_known:
            return self.blocks.index(block), root, {}
        numbers = iter(range(len(leaves)))
        layout = {
            "arrays": [[leaf.dtype.str, leaf.shape, address_of(leaf) - block.address] for leaf in leaves],
            "places": map_tree(lambda _: next(numbers), columns),
        }
        return self.blocks.index(block), root, layout

    def _copied(self, leaves: Sequence[NDArray[Any]]) -> tuple[list[NDArray[Any]], SharedBlock, NDArray[np.uint8]]:
        sizes = [-(-leaf.nbytes // _ALIGNMENT) * _ALIGNMENT for leaf in leaves]
        size = 1 << max(_LEAST, (sum(sizes) - 1).bit_length())
        pool = self._pools.setdefault(size, BlockPool(size, SharedBlock))
        index, root = pool.take()
        copies, offset = [], 0
        for leaf, nbytes in zip(leaves, sizes, strict=True):
            copies.append(_view(root, leaf.dtype, leaf.shape, offset))
            copies[-1][...] = leaf
            offset += nbytes
        return copies, pool.blocks[index], root


class FragmentReader:
    """Makes messages of what a `FragmentWriter` said and wrote.

    lane        number of the lane
    hands_on    whether blocks keep their descriptors, for other processes

    freed    indices of the blocks that nobody here refers to any more, to be told to the writer
    """

    def __init__(self, lane: int, *, hands_on: bool) -> None:
        self.freed: deque[int] = deque()
        self._lane, self._hands_on = lane, hands_on
        self._blocks: dict[int, SharedBlock] = {}
        self._layout: tuple[list[tuple[Any, ...]], Tree, Plain]  # places of arrays, and forms, as told last

    def map(self, index: int, block: SharedBlock) -> None:
        """Take a block of the writer's."""
        self._blocks[index] = block
        if not self._hands_on:
            block.close()

    def read(self, index: int, fields: Plain) -> wire.Fragment:
        """The message of the fragment in a block, with its columns where they lie."""
        rest: Plain = fields["rest"]
        if "arrays" in fields:
            arrays = [(np.dtype(name), tuple(shape), offset) for name, shape, offset in fields["arrays"]]
            self._layout = arrays, fields["places"], {"forms": rest.get("forms")}
        arrays, places, forms = self._layout
        memory = self._blocks[index].array()
        weakref.finalize(memory, self.freed.append, index).atexit = False
        leaves = [_view(memory, *place) for place in arrays]
        columns: Any = map_tree(lambda number: leaves[number], places)
        return wire.Fragment(self._lane, 1, columns, forms | rest)


def _view(memory: NDArray[np.uint8], dtype: np.dtype[Any], shape: Sequence[int], offset: int) -> NDArray[Any]:
    return memory[offset : offset + dtype.itemsize * math.prod(shape)].view(dtype).reshape(shape)
