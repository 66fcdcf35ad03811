"""Fragments of several agents from one process to another: columns in shared memory, the rest as a few bytes."""

import math
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from rollflow.nodes.offloaded.agent_fragment_message import PartSpaces, agents_of_message, message_of_agents
from rollflow.stream import wire
from rollflow.stream.data.blocks import SharedBlock
from rollflow.stream.data.tree import leaves_of, map_tree
from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment
from rollflow.stream.multi_agent.multi_agent_lane import MultiAgentLane

Plain = dict[str, Any]
_ALIGNMENT = 64  # bytes


class AgentFragmentWriter:
    """Puts the fragments of a lane into blocks that another process sees, as `FragmentWriter` does for one agent.

    Agents stand in rows of their own, so nothing is to be seen of a fragment in the making.

    blocks    all that there are; one is written again once `free` says that the other process is done with it
    """

    place = -1

    def __init__(self, lane: MultiAgentLane) -> None:
        self.blocks: list[SharedBlock] = []
        self._lane = lane
        self._free: list[int] = []

    def begin(self) -> None:
        """Say nothing of the fragment in the making."""

    def keep_finals(self) -> None:
        """Keep nothing of the fragment in the making."""

    def write(self, fragment: MultiAgentFragment) -> tuple[int, Plain]:
        """The index of the block that a fragment is put in, and what else there is to say of it."""
        message = message_of_agents(0, fragment, spaces_of(self._lane), {})
        leaves, size, arrays = leaves_of(message.columns), 0, []
        for leaf in leaves:
            arrays.append([leaf.dtype.str, list(leaf.shape), size])
            size += -(-leaf.nbytes // _ALIGNMENT) * _ALIGNMENT
        index = self._block_of(size)
        memory = self.blocks[index].array()
        for leaf, (_, shape, offset) in zip(leaves, arrays, strict=True):
            memory[offset : offset + leaf.nbytes].view(leaf.dtype).reshape(shape)[...] = leaf
        numbers = iter(range(len(leaves)))
        places = map_tree(lambda _: next(numbers), message.columns)
        return index, {"arrays": arrays, "places": places, "rest": message.rest}

    def free(self, index: int) -> None:
        """The other process has no more use for a block."""
        self._free.append(index)

    def _block_of(self, size: int) -> int:
        """A block with at least so many bytes, which nobody reads."""
        for index in self._free:
            if self.blocks[index].size >= size:
                self._free.remove(index)
                return index
        self.blocks.append(SharedBlock(max(size, 1)))
        return len(self.blocks) - 1


class AgentFragmentReader:
    """Makes fragments of what an `AgentFragmentWriter` said and wrote.

    lane        number of the lane
    spaces      of the agents, as the writer has them
    num_rows    vector steps of a whole fragment

    freed       indices of the blocks that nobody here refers to any more, to be told to the writer
    """

    def __init__(self, lane: int, spaces: Sequence[PartSpaces], num_rows: int) -> None:
        self.freed: deque[int] = deque()
        self.num_rows = num_rows
        self._lane, self._spaces = lane, spaces
        self._blocks: dict[int, SharedBlock] = {}

    def map(self, index: int, block: SharedBlock) -> None:
        """Take a block of the writer's."""
        self._blocks[index] = block
        block.close()

    def begin(self, fields: Plain) -> None:
        """Take nothing: a writer says nothing of a fragment in the making."""

    def read(self, index: int, fields: Plain) -> MultiAgentFragment:
        """The fragment in a block; read-only, with its columns where they lie."""
        memory = self._blocks[index].array()
        weakref.finalize(memory, self.freed.append, index).atexit = False
        leaves = []
        for name, shape, offset in fields["arrays"]:
            dtype = np.dtype(name)
            leaf = memory[offset : offset + dtype.itemsize * math.prod(shape)].view(dtype).reshape(shape)
            leaf.flags.writeable = False
            leaves.append(leaf)
        columns = map_tree(lambda number: leaves[number], fields["places"])
        return agents_of_message(wire.Fragment(self._lane, 1, columns, fields["rest"]), self._spaces)

    def rescue(self, sequence: int, rows: int, reason: str) -> None:
        """Take nothing: the rows of a fragment in the making can't be seen."""


def spaces_of(lane: MultiAgentLane) -> list[PartSpaces]:
    """The spaces of a lane's agents."""
    return [PartSpaces(part.part, part.observation_spaces) for part in lane.parts]
