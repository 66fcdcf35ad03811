"""Fragments from one process to another: columns in shared memory, the rest as a few bytes."""

import weakref
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollflow.stream.fragment import Final, Fragment, FragmentLayout, Loss
from rollflow.stream.infos import SlotInfos
from rollflow.stream.shared_memory import BlockLayout, BlockPool, SharedBlock
from rollflow.stream.space_codec import describe_space, space_of
from rollflow.stream.tree import leaves_of, map_tree

Plain = dict[str, Any]


class FragmentWriter:
    """Puts the fragments of one lane into blocks.

    A block is written again once `free` says that the other process is done with it.
    """

    def __init__(self) -> None:
        self.pool: BlockPool | None = None
        self._layout: BlockLayout | None = None
        self._lent: dict[int, NDArray[np.uint8]] = {}

    def write(self, fragment: Fragment) -> tuple[int, Plain]:
        """Copy a fragment's columns into a block; its index, and what else there is to say of the fragment."""
        told: Plain = {}
        if self._layout is None or self.pool is None:
            rows = {
                name: (map_tree(lambda leaf: np.zeros_like(leaf[0]), column.tree), len(leaves_of(column.tree)[0]))
                for name, column in fragment.columns.items()
            }
            self._layout = BlockLayout(rows)
            self.pool = BlockPool(self._layout.size)
            assert fragment.observation_space is not None
            told = {"columns": rows, "observation_space": describe_space(fragment.observation_space)}
        index, block = self.pool.take()
        self._lent[index] = block
        for name, column in self._layout.columns(block).items():
            column.copy_rows(fragment.columns[name], 0, fragment.last_row + (name == "obs"))
        return index, told | _described(fragment)

    def free(self, index: int) -> None:
        """The other process has no more use for a block."""
        self._lent.pop(index, None)


class FragmentReader:
    """Makes fragments of what a `FragmentWriter` said and wrote.

    freed    indices of the blocks that nobody here refers to any more, to be told to the writer
    """

    def __init__(self, layout: FragmentLayout, lane: int) -> None:
        self.freed: deque[int] = deque()
        self._layout, self._lane = layout, lane
        self._blocks: dict[int, SharedBlock] = {}
        self._columns: BlockLayout | None = None
        self._space: Any = None

    def map(self, index: int, block: SharedBlock) -> None:
        """Take a block of the writer's."""
        self._blocks[index] = block
        block.close()

    def read(self, index: int, told: Plain) -> Fragment:
        """The fragment in a block; read-only, with its columns where they lie."""
        if "columns" in told:
            self._columns = BlockLayout(told["columns"])
            self._space = space_of(told["observation_space"])
        assert self._columns is not None
        array = self._blocks[index].array()
        weakref.finalize(array, self.freed.append, index).atexit = False
        fragment = Fragment(
            self._layout,
            self._lane,
            told["sequence"],
            self._columns.columns(array),
            episode_start=told["episode_start"],
            episode_number=told["episode_number"],
        )
        fragment.observation_space = self._space
        fragment.finals = [Final(*final) for final in told["finals"]]
        fragment.losses = [Loss(*loss) for loss in told["losses"]]
        if told["infos"] is not None:
            fragment.infos[: len(told["infos"])] = told["infos"]
        fragment.custom_data = {(slot, number): data for slot, number, data in told["custom_data"]}
        fragment.seal(told["num_rows"])
        return fragment


def _described(fragment: Fragment) -> Plain:
    has_infos = any(infos or isinstance(infos, SlotInfos) for infos in fragment.infos)
    return {
        "sequence": fragment.sequence,
        "num_rows": fragment.num_rows,
        "episode_start": fragment.episode_start,
        "episode_number": fragment.episode_number,
        "finals": [[each.row, each.slots, each.observations, each.infos] for each in fragment.finals],
        "losses": [[each.row, each.slots, each.cut, each.reason] for each in fragment.losses],
        "infos": fragment.infos if has_infos else None,
        "custom_data": [[*key, data] for key, data in fragment.custom_data.items()],
    }
