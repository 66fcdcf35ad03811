"""Fragments from one process to another: columns in shared memory, the rest as a few bytes.

The other process sees the rows of a fragment in the making as well: where the one that makes it is killed, what there
is of it can be rescued.
"""

import weakref
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollflow.stream.data.blocks import BlockLayout, SharedBlock
from rollflow.stream.data.column import Column
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.space import describe_space, space_of
from rollflow.stream.data.tree import Tree, concatenate_trees, kind_of, map_tree
from rollflow.stream.fragments.fragment import Final, Fragment, FragmentLayout, Loss, Start
from rollflow.stream.fragments.lane import FINAL_OBS, Lane, SharedRows

Plain = dict[str, Any]


class FragmentWriter:
    """Tells another process where the fragments of a lane lie, from their second step on.

    lane    shares its columns

    A block is written again once `free` says that the other process is done with it.
    """

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._begun: tuple[int, SharedRows] | None = None  # number and place of the fragment told of last
        self._lent: dict[int, SharedRows] = {}  # by the index of the block
        self._has_told_layout = False
        self._finals = 0  # of the fragment in the making, that stand in its block

    def begin(self) -> Plain | None:
        """Fields of the fragment in the making; None where it can't be seen, or has been told of."""
        lane = self._lane
        fragment = lane.fragment
        if self._begun is not None and self._begun[0] == fragment.sequence:
            return None
        if lane.shared is None and not lane.at_start:
            lane.share()
        place = lane.shared
        if place is None:
            return None
        self._begun, self._finals = (fragment.sequence, place), 0
        return {
            "block": place.number,
            "sequence": fragment.sequence,
            "episode_start": fragment.episode_start,
            "episode_number": fragment.episode_number,
            "starts": _starts_of(fragment),
        } | self._layout_of(fragment, place)

    @property
    def place(self) -> int:
        """Number of the fragment in the making times one more than a fragment's rows, plus the rows that there are."""
        lane = self._lane
        return lane.sequence * (lane.layout.num_rows + 1) + lane.row - lane.layout.lookback

    def keep_finals(self) -> None:
        """Put last observations where the other process sees them."""
        finals = self._lane.fragment.finals
        if self._finals == len(finals) or (place := self._lane.shared) is None:
            return
        assert place.final_obs is not None
        tree = place.final_obs.tree
        for final in finals[self._finals :]:
            if isinstance(tree, np.ndarray):  # without a walk over it: there may be some at every step
                tree[final.row, final.slots] = final.observations
            else:
                map_tree(partial(_put, final.row, final.slots), tree, final.observations)
        self._finals = len(finals)

    def write(self, fragment: Fragment) -> tuple[int, Plain]:
        """The block that a fragment lies in, where it is put if it does not, and what else there is to say of it."""
        if self._begun is not None and self._begun[0] == fragment.sequence:
            place = self._begun[1]
        else:  # it had no second step
            place = self._copied(fragment)
        self._lent[place.number] = place
        return place.number, self._layout_of(fragment, place) | described(fragment)

    def free(self, index: int) -> None:
        """The other process has no more use for a block."""
        self._lent.pop(index, None)

    @property
    def blocks(self) -> list[SharedBlock]:
        """All that there are."""
        shared = self._lane.shared
        return [] if shared is None else shared.pool.blocks

    def _layout_of(self, fragment: Fragment, place: SharedRows) -> Plain:
        """Layout of blocks, the first time."""
        if self._has_told_layout:
            return {}
        self._has_told_layout = True
        assert fragment.observation_space is not None
        columns = dict(fragment.columns)
        if place.final_obs is not None:
            columns[FINAL_OBS] = place.final_obs
        rows = {
            name: (map_tree(lambda leaf: np.zeros_like(leaf[0]), column.tree), len(column))
            for name, column in columns.items()
        }
        return {"columns": rows, "observation_space": describe_space(fragment.observation_space)}

    def _copied(self, fragment: Fragment) -> SharedRows:
        shared = self._lane.shared
        assert shared is not None
        index, block = shared.pool.take()
        columns = shared.layout.columns(block)
        for name, column in fragment.columns.items():
            columns[name].copy_rows(column, 0, fragment.last_row + (name == Columns.OBS))
        return shared._replace(number=index, block=block, final_obs=columns.get(FINAL_OBS))


class FragmentReader:
    """Makes fragments of what a `FragmentWriter` said and wrote.

    hands_on    whether blocks keep their descriptors, for other processes

    freed    indices of the blocks that nobody here refers to any more, to be told to the writer
    """

    def __init__(self, layout: FragmentLayout, lane: int, *, hands_on: bool = False) -> None:
        self.freed: deque[int] = deque()
        self._layout, self._lane, self._hands_on = layout, lane, hands_on
        self._blocks: dict[int, SharedBlock] = {}
        self._columns: BlockLayout | None = None
        self._space: Any = None
        self._begun: Plain | None = None
        self._initial_state: Tree = None  # of an episode, as recorded last

    @property
    def num_rows(self) -> int:
        """Vector steps of a whole fragment."""
        return self._layout.num_rows

    def map(self, index: int, block: SharedBlock) -> None:
        """Take a block of the writer's."""
        self._blocks[index] = block
        if not self._hands_on:
            block.close()

    def begin(self, fields: Plain) -> None:
        """Take what was said of a fragment in the making."""
        self._learn_layout(fields)
        self._begun = fields
        self._learn_state(fields)

    def read(self, index: int, fields: Plain) -> Fragment:
        """The fragment in a block; read-only, with its columns where they lie."""
        self._learn_layout(fields)
        self._learn_state(fields)
        columns = self._columns_of(index)
        columns.pop(FINAL_OBS, None)
        return restored(self._layout, self._lane, columns, fields, self._space)

    def rescue(self, sequence: int, rows: int, reason: str) -> Fragment | None:
        """Take the first `rows` rows of a fragment whose writer has gone; None where they can't be seen.

        Its infos, and what pieces put into `custom_data`, are lost. Episodes that began after its first step get the
        initial state that the lane recorded last.
        """
        fields = self._begun
        if fields is None or fields["sequence"] != sequence or not rows:
            return None
        columns = self._columns_of(fields["block"])
        last = columns.pop(FINAL_OBS, None)
        fragment = _begun(self._layout, self._lane, columns, fields, self._space)
        fragment.num_rows = rows
        if last is not None:
            done = columns[Columns.TERMINATEDS].tree | columns[Columns.TRUNCATEDS].tree
            for row in range(fragment.first_row, fragment.last_row):
                if len(slots := np.flatnonzero(done[row])):
                    items = map_tree(lambda leaf, row=row, slots=slots: leaf[row, slots], last.tree)
                    fragment.finals.append(Final(row, slots, items, {}))
        fragment.starts = [Start(*start) for start in fields["starts"]]
        fragment.end_with_loss(reason)
        if self._initial_state is not None:
            fragment.assume_initial_state(self._initial_state)
        fragment.seal(rows)
        return fragment

    def _learn_state(self, fields: Plain) -> None:
        for _, _, states in fields.get("starts", ()):
            self._initial_state = map_tree(lambda leaf: np.array(leaf[-1]), states)

    def _learn_layout(self, fields: Plain) -> None:
        if "columns" in fields:
            self._columns = BlockLayout(fields["columns"])
            self._space = space_of(fields["observation_space"])

    def _columns_of(self, index: int) -> dict[str, Column]:
        assert self._columns is not None
        array = self._blocks[index].array()
        weakref.finalize(array, self.freed.append, index).atexit = False
        return self._columns.columns(array)


def restored(
    layout: FragmentLayout, lane: int, columns: dict[str, Column], fields: Mapping[str, Any], observation_space: Any
) -> Fragment:
    """A fragment out of its columns and of what `described` said of it; read-only."""
    fragment = _begun(layout, lane, columns, fields, observation_space)
    complete(fragment, fields)
    fragment.seal(fields["num_rows"])
    return fragment


def complete(fragment: Fragment, fields: Mapping[str, Any]) -> None:
    """Give a fragment what `described` said of its ends, losses, infos and custom data."""
    if fields.get("finals") is not None:
        fragment.finals = _finals_of(fields["finals"])
    fragment.starts = [Start(*start) for start in fields.get("starts", ())]
    fragment.losses = [Loss(*loss) for loss in fields.get("losses", ())]
    if fields.get("infos") is not None:
        fragment.infos[: len(fields["infos"])] = fields["infos"]
    fragment.custom_data = {(slot, number): data for slot, number, data in fields.get("custom_data", ())}


def described(fragment: Fragment) -> Plain:
    """Fields of a fragment beside its columns; those of which there is none are left out."""
    fields = {
        "sequence": fragment.sequence,
        "num_rows": fragment.num_rows,
        "episode_start": fragment.episode_start,
        "episode_number": fragment.episode_number,
    }
    if fragment.finals:
        fields["finals"] = _joined(fragment.finals)
    if fragment.starts:
        fields["starts"] = _starts_of(fragment)
    if fragment.losses:
        fields["losses"] = [[each.row, each.slots, each.cut, each.reason] for each in fragment.losses]
    if any(fragment.infos):
        fields["infos"] = fragment.infos
    if fragment.custom_data:
        fields["custom_data"] = [[*key, data] for key, data in fragment.custom_data.items()]
    return fields


def _begun(
    layout: FragmentLayout, lane: int, columns: dict[str, Column], fields: Mapping[str, Any], observation_space: Any
) -> Fragment:
    """A fragment of which nothing is known but its columns, and how its episodes began."""
    start, number = fields["episode_start"], fields["episode_number"]
    fragment = Fragment(layout, lane, fields["sequence"], columns, episode_start=start, episode_number=number)
    fragment.observation_space = observation_space
    return fragment


def _joined(finals: list[Final]) -> Plain:
    """All last observations as one tree: there may be hundreds."""
    infos = [each.infos for each in finals]
    return {
        "rows": [each.row for each in finals],
        "counts": [len(each.slots) for each in finals],
        "slots": np.concatenate([each.slots for each in finals]),
        "observations": concatenate_trees([each.observations for each in finals]),
        "infos": infos if any(infos) else None,
    }


def _finals_of(fields: Plain) -> list[Final]:
    slots, observations, finals, begin = fields["slots"], fields["observations"], [], 0
    for index, (row, count) in enumerate(zip(fields["rows"], fields["counts"], strict=True)):
        end = begin + count
        items = map_tree(lambda leaf, begin=begin, end=end: leaf[begin:end], observations)
        finals.append(Final(row, slots[begin:end], items, {} if fields["infos"] is None else fields["infos"][index]))
        begin = end
    return finals


def _starts_of(fragment: Fragment) -> list[list[Any]]:
    """Rows, slots and states of a fragment's starts, those of one kind together: there may be hundreds."""
    groups: dict[str, list[Start]] = {}
    for start in fragment.starts:
        groups.setdefault(str(kind_of(start.states)), []).append(start)
    return [
        [
            np.concatenate([each.rows for each in group]),
            np.concatenate([each.slots for each in group]),
            concatenate_trees([each.states for each in group]),
        ]
        for group in groups.values()
    ]


def _put(row: int, slots: NDArray[np.int64], leaf: NDArray[Any], values: NDArray[Any]) -> None:
    leaf[row, slots] = values
