"""Fragments from one process to another, with their columns in memory that both see.

The other process sees the rows of a fragment in the making as well, of one agent: where the process that makes it is
killed, what there is of it can be rescued.
"""

import math
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollflow.nodes.env.workers.frames import FrameKind
from rollflow.nodes.offloaded.agent_fragment_message import message_of_lane
from rollflow.nodes.offloaded.fragment_message import described, index_of
from rollflow.stream import wire
from rollflow.stream.data.blocks import BlockPool, SharedBlock, address_of, block_under, root_of
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.tree import Tree, leaves_of, map_tree
from rollflow.stream.fragments.lane import FINAL_OBS, Lane
from rollflow.stream.multi_agent.multi_agent_fragment import AnyFragment, MultiAgentFragment
from rollflow.stream.multi_agent.multi_agent_lane import MultiAgentLane

Plain = dict[str, Any]
_ALIGNMENT = 64  # bytes
_LEAST = 12  # binary logarithm of a block's bytes
_OF_ONE_IN_THE_MAKING = ("sequence", "episode_start", "episode_number", "starts", "forms", "space")


class FragmentWriter:
    """Tells another process where the fragments of a lane lie; those of private memory are copied.

    blocks    all that the other process is to see; one is written again once `free` says that it is done with it
    """

    def __init__(self, lane: Lane | MultiAgentLane) -> None:
        self.blocks: list[SharedBlock] = []
        self._lane = lane
        self._lent: dict[int, NDArray[np.uint8]] = {}  # by the index of the block
        self._pools: dict[int, BlockPool[SharedBlock]] = {}  # of blocks for copies, by size
        self._rows: dict[FrameKind, int] = {}  # in the columns whose places were told last
        self._begun = -1  # number of the fragment in the making that was told of last
        self._finals = 0  # of it, that stand in its block

    def begin(self) -> tuple[int, Plain] | None:
        """Block and fields of the fragment in the making, from its second step on; None: not seen, or told of."""
        lane = self._lane
        if isinstance(lane, MultiAgentLane) or self._begun == lane.sequence:
            return None
        if lane.shared is None and not lane.at_start:
            lane.share()
        place = lane.shared
        if place is None:
            return None
        self._begun, self._finals = lane.sequence, 0
        if (known := self._known(lane.fragment, FrameKind.FILLING)) is not None:
            index, _, fields = known
            return index, {"rest": _in_the_making(fields["rest"])}
        message = message_of_lane(lane, 0, lane.fragment, {})
        columns = dict(message.columns)
        rest = _in_the_making(message.rest)
        if place.final_obs is not None:
            columns[FINAL_OBS] = place.final_obs.tree
            rest["forms"] = {FINAL_OBS: rest["forms"].get(Columns.OBS), **rest["forms"]}
        index, _, fields = self._placed(columns, FrameKind.FILLING)
        return index, fields | {"rest": rest}

    @property
    def place(self) -> int:
        """Number of the fragment in the making times one more than a fragment's rows, plus the rows that there are.

        -1: they can't be seen.
        """
        lane = self._lane
        if isinstance(lane, MultiAgentLane):
            return -1
        return lane.sequence * (lane.layout.num_rows + 1) + lane.row - lane.layout.lookback

    def keep_finals(self) -> None:
        """Put last observations where the other process sees them."""
        lane = self._lane
        if isinstance(lane, MultiAgentLane) or self._finals == len(lane.fragment.finals) or lane.shared is None:
            return
        finals, column = lane.fragment.finals, lane.shared.final_obs
        assert column is not None
        for final in finals[self._finals :]:
            if isinstance(column.tree, np.ndarray):  # without a walk over it: there may be some at every step
                column.tree[final.row, final.slots] = final.observations
            else:
                map_tree(partial(_put, final.row, final.slots), column.tree, final.observations)
        self._finals = len(finals)

    def write(self, fragment: AnyFragment) -> tuple[int, Plain]:
        """The block that a fragment lies in, where it is put if it does not, and what else there is to say of it."""
        if (known := self._known(fragment, FrameKind.FRAGMENT)) is not None:
            index, root, fields = known
        else:
            message = message_of_lane(self._lane, 0, fragment, {})
            index, root, fields = self._placed(message.columns, FrameKind.FRAGMENT)
            fields |= {"rest": message.rest}
        self._lent[index] = root
        return index, fields

    def free(self, index: int) -> None:
        """The other process has no more use for a block."""
        self._lent.pop(index, None)

    def _known(self, fragment: AnyFragment, kind: FrameKind) -> tuple[int, NDArray[np.uint8], Plain] | None:
        """Block of a fragment, its root, and all that is to be said where the rest was said last; None: it was not.

        Its columns are not looked at one by one: it takes a while, in the worker's thread.
        """
        lane = self._lane
        if isinstance(lane, MultiAgentLane) or isinstance(fragment, MultiAgentFragment):
            return None
        if self._rows.get(kind) != fragment.last_row:
            return None
        root = root_of(leaves_of(fragment.columns[min(fragment.columns)].tree)[0])
        block = block_under(root)
        if block not in self.blocks:
            return None
        rest = described(fragment) | {"space": index_of(fragment.observation_space, lane.observation_spaces)}
        return self.blocks.index(block), root, {"rest": rest}

    def _placed(self, columns: Tree, kind: FrameKind) -> tuple[int, NDArray[np.uint8], Plain]:
        """The block that arrays lie in, what keeps it from being written again, and the places in it.

        The places are left out where they are those of the last frame of this kind: all blocks of a lane are alike.
        """
        leaves = leaves_of(columns)
        rows, root = min(map(len, leaves)), root_of(leaves[0])
        block = block_under(root)
        if block is None:
            leaves, block, root = self._copied(leaves)
            rows = -1
        if block not in self.blocks:
            self.blocks.append(block)
        is_known, self._rows[kind] = rows >= 0 and self._rows.get(kind) == rows, rows
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
        self._begun: tuple[int, Plain] | None = None  # block, and rest of the message
        self._layouts: dict[FrameKind, tuple[list[tuple[Any, ...]], Tree, Plain]] = {}
        self.initial_state: Tree = None  # of an episode, as recorded last

    def map(self, index: int, block: SharedBlock) -> None:
        """Take a block of the writer's."""
        self._blocks[index] = block
        if not self._hands_on:
            block.close()

    def begin(self, index: int, fields: Plain) -> None:
        """Take what was said of a fragment in the making."""
        self._begun = index, fields["rest"]
        self._learn(FrameKind.FILLING, fields)

    def read(self, index: int, fields: Plain) -> wire.Fragment:
        """The message of the fragment in a block, with its columns where they lie."""
        self._learn(FrameKind.FRAGMENT, fields)
        return self._message(index, fields["rest"], FrameKind.FRAGMENT)

    def in_the_making(self, sequence: int) -> wire.Fragment | None:
        """The message of the fragment in the making, if it has this number and can be seen."""
        if self._begun is None or self._begun[1]["sequence"] != sequence:
            return None
        return self._message(*self._begun, FrameKind.FILLING)

    def _message(self, index: int, rest: Plain, kind: FrameKind) -> wire.Fragment:
        arrays, places, forms = self._layouts[kind]
        memory = self._blocks[index].array()
        weakref.finalize(memory, self.freed.append, index).atexit = False
        leaves = [_view(memory, *place) for place in arrays]
        columns: Any = map_tree(lambda number: leaves[number], places)
        return wire.Fragment(self._lane, 1, columns, forms | rest)

    def _learn(self, kind: FrameKind, fields: Plain) -> None:
        if "arrays" in fields:
            arrays = [(np.dtype(name), tuple(shape), offset) for name, shape, offset in fields["arrays"]]
            forms = fields["rest"].get("forms")
            self._layouts[kind] = arrays, fields["places"], {} if forms is None else {"forms": forms}
        for _, _, states in fields["rest"].get("starts", ()):
            self.initial_state = map_tree(lambda leaf: np.array(leaf[-1]), states)


def _view(memory: NDArray[np.uint8], dtype: np.dtype[Any], shape: Sequence[int], offset: int) -> NDArray[Any]:
    return memory[offset : offset + dtype.itemsize * math.prod(shape)].view(dtype).reshape(shape)


def _in_the_making(rest: Mapping[str, Any]) -> Plain:
    return {name: rest[name] for name in _OF_ONE_IN_THE_MAKING if name in rest}


def _put(row: int, slots: NDArray[np.int64], leaf: NDArray[Any], values: NDArray[Any]) -> None:
    leaf[row, slots] = values
