"""Fragments from one process to another: columns in shared memory, the rest as a few bytes."""

import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollflow.stream.blocks import BlockLayout, BlockPool, SharedBlock
from rollflow.stream.column import Column
from rollflow.stream.fragment import Final, Fragment, FragmentLayout, Loss
from rollflow.stream.infos import SlotInfos
from rollflow.stream.space_codec import describe_space, space_of
from rollflow.stream.tree import concatenate_trees, leaves_of, map_tree

Plain = dict[str, Any]


class FragmentWriter:
    """Puts the fragments of one lane into blocks.

    A block is written again once `free` says that the other process is done with it.
    """

    def __init__(self) -> None:
        self.pool: BlockPool[SharedBlock] | None = None
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
            self.pool = BlockPool(self._layout.size, SharedBlock)
            assert fragment.observation_space is not None
            told = {"columns": rows, "observation_space": describe_space(fragment.observation_space)}
        index, block = self.pool.take()
        self._lent[index] = block
        for name, column in self._layout.columns(block).items():
            column.copy_rows(fragment.columns[name], 0, fragment.last_row + (name == "obs"))
        return index, told | described(fragment)

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
        return restored(self._layout, self._lane, self._columns.columns(array), told, self._space)


def restored(
    layout: FragmentLayout, lane: int, columns: dict[str, Column], told: Mapping[str, Any], observation_space: Any
) -> Fragment:
    """A fragment out of its columns and of what `described` said of it; read-only."""
    fragment = Fragment(
        layout,
        lane,
        told["sequence"],
        columns,
        episode_start=told["episode_start"],
        episode_number=told["episode_number"],
    )
    fragment.observation_space = observation_space
    fragment.finals = _finals_of(told["finals"])
    fragment.losses = [Loss(*loss) for loss in told["losses"]]
    if told["infos"] is not None:
        fragment.infos[: len(told["infos"])] = told["infos"]
    fragment.custom_data = {(slot, number): data for slot, number, data in told["custom_data"]}
    fragment.seal(told["num_rows"])
    return fragment


def described(fragment: Fragment) -> Plain:
    """What there is to say of a fragment beside its columns."""
    return {
        "sequence": fragment.sequence,
        "num_rows": fragment.num_rows,
        "episode_start": fragment.episode_start,
        "episode_number": fragment.episode_number,
        "finals": _joined(fragment.finals),
        "losses": [[each.row, each.slots, each.cut, each.reason] for each in fragment.losses],
        "infos": fragment.infos if any(map(_has_infos, fragment.infos)) else None,
        "custom_data": [[*key, data] for key, data in fragment.custom_data.items()],
    }


def _joined(finals: list[Final]) -> Plain | None:
    """All last observations as one tree: there may be hundreds."""
    if not finals:
        return None
    infos = [each.infos for each in finals]
    return {
        "rows": [each.row for each in finals],
        "counts": [len(each.slots) for each in finals],
        "slots": np.concatenate([each.slots for each in finals]),
        "observations": concatenate_trees([each.observations for each in finals]),
        "infos": infos if any(map(_has_infos, infos)) else None,
    }


def _finals_of(told: Plain | None) -> list[Final]:
    if told is None:
        return []
    slots, observations, finals, begin = told["slots"], told["observations"], [], 0
    for index, (row, count) in enumerate(zip(told["rows"], told["counts"], strict=True)):
        end = begin + count
        items = map_tree(lambda leaf, begin=begin, end=end: leaf[begin:end], observations)
        finals.append(Final(row, slots[begin:end], items, {} if told["infos"] is None else told["infos"][index]))
        begin = end
    return finals


def _has_infos(infos: Any) -> bool:
    return any(infos.dicts) if isinstance(infos, SlotInfos) else bool(infos)
