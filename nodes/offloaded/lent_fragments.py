"""Fragments from one process to another, with their columns in memory that both see."""

import weakref
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollflow.nodes.offloaded.fragment_message import described, message_of_lane
from rollflow.stream import wire
from rollflow.stream.data.blocks import ArrayPlaces, BlockPool, SharedBlock, block_under, root_of
from rollflow.stream.data.tree import leaves_of, map_tree
from rollflow.stream.fragments.lane import Lane
from rollflow.stream.multi_agent.multi_agent_fragment import AnyFragment, MultiAgentFragment
from rollflow.stream.multi_agent.multi_agent_lane import MultiAgentLane
from rollflow.stream.wire.codec.value import DTYPES, decode_lent, encode_value

Plain = dict[str, Any]
_Roots = dict[SharedBlock, NDArray[np.uint8]]


class FragmentWriter:
    """Tells another process where the fragments of a lane lie; those of private memory are copied.

    blocks    all that the other process is to see; one is written again once `free` says that it is done with it
    """

    def __init__(self, lane: Lane | MultiAgentLane) -> None:
        self.blocks: list[SharedBlock] = []
        self._lane = lane
        self._lent: dict[int, NDArray[np.uint8]] = {}  # by the index of the block
        self._pools: dict[int, BlockPool[SharedBlock]] = {}  # of blocks for copies, by size
        self._told: Plain = {}  # of columns, last
        self._rows = -1  # in these columns; -1: they are not all in one block of the lane's

    def write(self, fragment: AnyFragment) -> Plain:
        """The blocks that a fragment lies in, where it is put if it does not, and what else there is to say of it."""
        roots, fields = self._known(fragment) or self._placed(fragment)
        for block in roots:
            if block not in self.blocks:
                self.blocks.append(block)
        by_index = {self.blocks.index(block): root for block, root in roots.items()}
        self._lent |= by_index
        return fields | {"blocks": list(by_index)}

    def free(self, index: int) -> None:
        """The other process has no more use for a block."""
        self._lent.pop(index, None)

    def _known(self, fragment: AnyFragment) -> tuple[_Roots, Plain] | None:
        """Block of a fragment, and all that is to be said where the columns were told last; None: they were not.

        Its columns are not looked at one by one: it takes a while, in the worker's thread.
        """
        lane = self._lane
        if isinstance(lane, MultiAgentLane) or isinstance(fragment, MultiAgentFragment):
            return None
        if self._rows != fragment.last_row:
            return None
        root = root_of(leaves_of(fragment.columns[min(fragment.columns)].tree)[0])
        block = block_under(root)
        if block is None or block not in self.blocks:
            return None
        return {block: root}, {"rest": described(fragment, lane.observation_spaces)}

    def _placed(self, fragment: AnyFragment) -> tuple[_Roots, Plain]:
        """Blocks of a fragment, and what is to be said; the columns only if they were told otherwise last."""
        message = message_of_lane(self._lane, 0, fragment, {})
        dtypes = [_local_dtype(leaf) for leaf in leaves_of(message.columns)]
        columns: Any = map_tree(_lent, message.columns) if any(dtypes) else message.columns
        leaves = leaves_of(columns)
        places = ArrayPlaces(leaves, self._pools)
        told = {"columns": encode_value(columns, "columns", places.put)[0], "dtypes": dtypes}
        fields = {"rest": message.rest} | ({} if told == self._told else told)
        self._told = told
        self._rows = -1 if places.copied or len(places.roots) != 1 else min(map(len, leaves))
        return places.roots, fields


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
        self._columns = b""  # as they were told last
        self._dtypes: list[str] = []  # which came with them

    def map(self, index: int, block: SharedBlock) -> None:
        """Take a block of the writer's."""
        self._blocks[index] = block
        if not self._hands_on:
            block.close()

    def read(self, fields: Plain) -> wire.Fragment:
        """The message of a fragment, with its columns where they lie."""
        if "columns" in fields:
            self._columns, self._dtypes = fields["columns"], fields["dtypes"]
        columns = decode_lent(self._columns, [self._array(index) for index in fields["blocks"]])
        if any(self._dtypes):
            dtypes = iter(self._dtypes)
            columns = map_tree(lambda leaf: leaf.view(name)[..., 0] if (name := next(dtypes)) else leaf, columns)
        return wire.Fragment(self._lane, 1, columns, fields["rest"])

    def _array(self, index: int) -> NDArray[np.uint8]:
        array = self._blocks[index].array()
        weakref.finalize(array, self.freed.append, index).atexit = False
        return array


def _local_dtype(array: NDArray[Any]) -> str:
    """Name of a dtype of plain memory that can't be lent as it is; empty for others."""
    dtype = array.dtype
    return dtype.str if dtype.kind in "iufcmMUS" and dtype.itemsize and dtype.str not in DTYPES else ""


def _lent(array: NDArray[Any]) -> NDArray[Any]:
    """An array any[...], or its bytes u8[..., itemsize] if it can't be lent as it is."""
    if not _local_dtype(array):
        return array
    plain = np.ascontiguousarray(array)
    return np.ndarray((*array.shape, array.dtype.itemsize), np.uint8, plain)
