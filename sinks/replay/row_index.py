"""Row index: which rows of a replay hold which steps, and how rows of one episode follow each other.

Rows form a ring. A *position* counts every row ever written; it stands in row `position % num_rows`. Positions from
`begin` to `end` are kept. A chunk of n steps takes n positions in a row:

    row            a step's observation, action, reward, …
    after a step   the row of the next observation, `following[row]`: the next step's row, wherever it stands

An episode's last observation has a row of its own behind its last step. The observation after a chunk whose episode
goes on is in a *spare* row, behind the ring, until the episode's next chunk comes. So every observation stands once.
"""

import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollflow.nodes.argument_checks import check_names, checked_count
from rollflow.stream.data.blocks import BlockLayout, PrivateBlock
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ColumnError, ReplayError
from rollflow.stream.data.tree import Tree, kind_of, leaves_of, map_tree
from rollflow.stream.fragments.fragment import ChunkIndex, Fragment, FragmentLayout

_FEW = 512


def read_ring(array: NDArray[Any], num_rows: int, begin: int, end: int) -> NDArray[Any]:
    """The rows of positions from `begin` to `end`, at most once round the ring; may be a view."""
    row = begin % num_rows
    there = array[row : min(row + end - begin, num_rows)]
    behind = end - begin - len(there)
    return np.concatenate([there, array[:behind]]) if behind else there


def write_ring(array: NDArray[Any], num_rows: int, begin: int, values: NDArray[Any]) -> None:
    """Set the rows of positions from `begin` on, at most once round the ring."""
    row = begin % num_rows
    before = num_rows - row
    array[row : row + len(values[:before])] = values[:before]
    if len(values) > before:
        array[: len(values) - before] = values[before:]


Ints = NDArray[np.int64]

_FIELDS = [
    ("first", np.int64),  # position of the first transition
    ("stop", np.int64),  # position after the last one
    ("t_started", np.int64),  # steps of the episode before the first
    ("before", np.int64),  # number of the episode's chunk before, -1: there was none, or it was not kept
    ("after", np.int64),  # number of the episode's next chunk, -1: it has not come
    ("has_ended", np.bool_),  # whether the episode ended with this chunk
    ("is_whole", np.bool_),  # whether all steps of the episode before it were kept when it came
]
_RECORD = np.dtype(_FIELDS, align=True)


class ChunkTable:
    """Records of the chunks with numbers from `begin` to `end`; older ones are forgotten.

    Fields are read by chunk numbers: `table.read("stop", numbers)`.
    """

    def __init__(self) -> None:
        self.begin = self.end = 0
        self._records = np.zeros(1024, _RECORD)  # a power of two: chunk number n stands in place n modulo this

    def read(self, field: str, numbers: Any) -> Any:
        """A field of the chunks with these numbers, which are all kept: an array of the shape of `numbers`."""
        return self._records[field][numbers & (len(self._records) - 1)]

    def write(self, field: str, numbers: Any, values: Any) -> None:
        """Set a field of the chunks with these numbers."""
        self._records[field][numbers & (len(self._records) - 1)] = values

    def add(self, fields: Mapping[str, NDArray[Any]]) -> None:
        """Add chunks, with the numbers from `end` on.

        fields    name -> values of all, any[count]
        """
        count, size = len(fields["first"]), len(self._records)
        while self.end + count - self.begin > size:
            size *= 2
        if size > len(self._records):
            kept, grown = self.numbers(), np.zeros(size, _RECORD)
            grown[kept & (size - 1)] = self._records[kept & (len(self._records) - 1)]
            self._records = grown
        for name, values in fields.items():
            write_ring(self._records[name], size, self.end, values)
        self.end += count

    def forget(self, begin: int) -> None:
        """Forget the chunks with numbers below `begin`."""
        self.begin = begin

    def numbers(self) -> Ints:
        """The numbers i64[C] of all chunks that are kept, oldest first."""
        return np.arange(self.begin, self.end)

    def get_state(self) -> dict[str, Any]:
        """The records, as plain arrays by field."""
        kept = self.numbers()
        return {"begin": self.begin, "end": self.end, "fields": {name: self.read(name, kept) for name, _ in _FIELDS}}

    def set_state(self, state: dict[str, Any]) -> None:
        """Take the records of `get_state`."""
        self.begin = self.end = state["begin"]
        self.add(state["fields"])


Bools = NDArray[np.bool_]


@dataclass(slots=True, eq=False)
class Room:
    """What the chunks of a lane's fragment take, and, once it is taken, where they are.

    opened    the episodes that the lane's slots are in
    before    i64[C]   number of the chunk that each one goes on, or -1
    freed     the spare rows behind those chunks, which become free
    alone     bool[C]  whether a chunk's last observation has a row of its own
    sizes     i64[C]   number of rows that each chunk takes

    begin           position of the first row; the others follow it
    source          i64[R]  which of the fragment's rows comes there: row * N + slot
    inserted        i64[I]  positions of the steps that may be sampled
    removed         i64[D]  positions of the steps that had to make room
    ended, rows     i64[E], i64[E]  chunks whose observation after the last step goes to these rows by itself
    """

    lane: str
    chunks: ChunkIndex
    opened: "OpenEpisodes"
    before: Ints
    freed: list[int]
    alone: Bools
    sizes: Ints
    begin: int = field(init=False)
    source: Ints = field(init=False)
    inserted: Ints = field(init=False)
    removed: Ints = field(init=False)
    ended: Ints = field(init=False)
    rows: Ints = field(init=False)


@dataclass(slots=True, eq=False)
class OpenEpisodes:
    """The episode that each of N slots of a lane is in.

    number    i64[N]  of the episode in its slot
    steps     i64[N]  so far
    chunk     i64[N]  number of its newest chunk, or -1
    layout    that all fragments of the lane share; None: not known, after a checkpoint
    """

    number: Ints
    steps: Ints
    chunk: Ints
    layout: FragmentLayout | None = None


class RowIndex:
    """Index over a ring of `num_rows` rows.

    history    steps of an episode before a step that are needed to sample it; without them it is removed

    is_live      bool[num_rows]  whether the row's step may be sampled
    is_step      bool[num_rows + spare]  whether the row is a step, and not only an observation
    following    i32[num_rows + spare]  row of the observation after the row's step
    num_live     number of steps that may be sampled
    inserted, removed    number of steps that came, and of those that are gone
    """

    def __init__(self, num_rows: int, history: int = 0) -> None:
        self.num_rows, self.history = num_rows, history
        self.num_spare = min(num_rows, max(64, num_rows // 64))
        total = num_rows + self.num_spare
        self.begin = self.end = self.num_live = self.inserted = self.removed = 0
        self.is_live = np.zeros(num_rows, np.bool_)
        self.is_step = np.zeros(total, np.bool_)
        self.following = np.zeros(total, np.int32)
        self.chunks = ChunkTable()
        self._chunk = np.zeros(num_rows, np.int64)
        self._free = list(range(total - 1, num_rows - 1, -1))  # spare rows
        self._open: dict[str, OpenEpisodes] = {}

    # Reading

    def rows(self, positions: Ints) -> Ints:
        """The rows of positions that are kept."""
        if positions.size < _FEW:
            return positions % self.num_rows
        # Faster for many than the remainder, since only two rounds of the ring come into question.
        rows = positions - (self.begin - self.begin % self.num_rows)
        rows -= self.num_rows * (rows >= self.num_rows)
        return rows

    def positions(self, rows: Ints) -> Ints:
        """The positions that are kept in rows of the ring."""
        return self.begin + (rows - self.begin) % self.num_rows

    def chunk_of(self, positions: Ints) -> Ints:
        """The numbers of the chunks that positions are in."""
        numbers: Ints = self._chunk[self.rows(positions)]
        return numbers

    def is_kept(self, positions: Ints) -> Bools:
        """Which positions hold a step that may be sampled."""
        there = (positions >= self.begin) & (positions < self.end)
        return there & self.is_live[positions % self.num_rows]

    def forward(self, positions: Ints, length: int) -> Ints:
        """The `length` steps from each position on, i64[B, length]; -1 behind the last step of the episode so far."""
        chunks, steps = self.chunks, np.arange(length)
        found = np.full((len(positions), length), -1)
        which = np.arange(len(positions))
        at, chunk, filled = positions, self.chunk_of(positions), np.zeros(len(positions), np.int64)
        while len(which):
            left = chunks.read("stop", chunk) - at
            columns = steps - filled[:, None]
            inside = (columns >= 0) & (columns < left[:, None])
            found[which] = np.where(inside, at[:, None] + columns, found[which])
            filled = filled + left
            chunk = chunks.read("after", chunk)
            goes_on = (filled < length) & (chunk >= 0)
            which, chunk, filled = which[goes_on], chunk[goes_on], filled[goes_on]
            at = chunks.read("first", chunk)
        return found

    def ahead(self, positions: Ints, steps: Ints | None = None) -> tuple[Ints, Ints]:
        """Go `steps` on in each episode, or to its newest step: (positions i64[B], steps gone i64[B])."""
        return self._walked(positions, np.iinfo(np.int64).max if steps is None else steps, is_back=False)

    def back(self, positions: Ints, steps: int) -> tuple[Ints, Ints]:
        """Go up to `steps` back in each episode, as far as it is kept: (positions i64[B], steps gone i64[B])."""
        return self._walked(positions, steps, is_back=True)

    def _walked(self, positions: Ints, steps: Ints | int, *, is_back: bool) -> tuple[Ints, Ints]:
        chunks, chunk = self.chunks, self.chunk_of(positions)
        at, gone = positions.copy(), np.zeros(len(positions), np.int64)
        wanted, which = np.broadcast_to(steps, len(positions)), np.arange(len(positions))
        while len(which):
            if is_back:
                there = at[which] - np.maximum(chunks.read("first", chunk), self.begin)
            else:
                there = chunks.read("stop", chunk) - 1 - at[which]
            moved = np.minimum(wanted[which] - gone[which], there)
            at[which] += -moved if is_back else moved
            gone[which] += moved
            chunk = chunks.read("before" if is_back else "after", chunk)
            goes_on = (gone[which] < wanted[which]) & (chunk >= chunks.begin)
            which, chunk = which[goes_on], chunk[goes_on]
            at[which] = chunks.read("stop", chunk) - 1 if is_back else chunks.read("first", chunk)
            gone[which] += 1
        return at, gone

    def episode_step(self, positions: Ints) -> Ints:
        """The number of steps in the episode before each position, i64[B]."""
        chunk = self.chunk_of(positions)
        steps: Ints = self.chunks.read("t_started", chunk) + positions - self.chunks.read("first", chunk)
        return steps

    @property
    def spare_in_use(self) -> Ints:
        """The spare rows i64[S] with an observation, ascending."""
        is_free = np.zeros(self.num_spare, np.bool_)
        is_free[np.array(self._free, np.int64) - self.num_rows] = True
        return self.num_rows + np.flatnonzero(~is_free)

    # Writing

    def room_for(self, lane: str, layout: FragmentLayout, chunks: ChunkIndex) -> Room:
        """What the chunks of a lane's fragment take; nothing is changed yet.

        lane    name of the lane; of several lanes with one name, which two rollouts with one seed have, episodes are
                not joined

        Raises ReplayError if the fragment is larger than the ring.
        """
        lengths, has_ended = chunks.stop - chunks.start, chunks.terminated | chunks.truncated
        opened = self._opened(lane, layout)
        slot = chunks.slot
        # Chunks that go on where one that is kept stopped.
        joins = (opened.number[slot] == chunks.number) & (opened.steps[slot] == chunks.t_started)
        joins &= (chunks.t_started > 0) & (opened.chunk[slot] >= self.chunks.begin)
        before = np.where(joins, opened.chunk[slot], -1)
        behind = self.following[self._last_rows(before[joins])]
        freed = behind[behind >= self.num_rows].tolist()
        alone = has_ended.copy()  # chunks whose last observation has a row of its own
        going_on = np.flatnonzero(~has_ended)
        alone[going_on[len(self._free) + len(freed) :]] = True
        sizes = lengths + alone
        total = int(sizes.sum())
        if total > self.num_rows:
            raise ReplayError(
                f"a fragment takes {total} rows, but the replay has {self.num_rows}: expected a capacity of several "
                "fragments; raise capacity, or lower fragment_length"
            )
        return Room(lane, chunks, opened, before, freed, alone, sizes)

    def num_steps_with(self, room: Room) -> int:
        """How many rows will be steps once a fragment has taken its room."""
        begin = max(self.begin, self.end + int(room.sizes.sum()) - self.num_rows)
        gone = np.count_nonzero(read_ring(self.is_step, self.num_rows, self.begin, begin))
        return int(np.count_nonzero(self.is_step) - gone + (room.sizes - room.alone).sum())

    def place(self, room: Room) -> None:
        """Forget the oldest rows for the room of a fragment, and take it; nothing has changed since it was made."""
        chunks, opened, before, alone, sizes = room.chunks, room.opened, room.before, room.alone, room.sizes
        lengths, has_ended = chunks.stop - chunks.start, chunks.terminated | chunks.truncated
        going_on, total = np.flatnonzero(~has_ended), int(sizes.sum())
        last = self._last_rows(before[before >= 0])
        self.following[last] = last  # the spare rows behind chunks that now go on are free
        self._free += room.freed
        removed = self._evict(self.end + total - self.num_rows)
        begin, self.end = self.end, self.end + total
        firsts = begin + np.cumsum(sizes) - sizes
        numbers = np.arange(self.chunks.end, self.chunks.end + len(lengths))
        lasts = np.flatnonzero(alone)  # chunks with a last observation's row behind them
        behind = (firsts + lengths)[lasts]
        behind_rows = behind % self.num_rows
        is_step = np.ones(total, np.bool_)
        is_step[behind - begin] = False
        first_row = begin % self.num_rows
        following = np.arange(first_row + 1, first_row + 1 + total, dtype=np.int32)
        following[max(0, self.num_rows - 1 - first_row) :] -= self.num_rows
        following[behind - begin] = behind_rows
        for array, values in (
            (self._chunk, np.repeat(numbers, sizes)),
            (self.is_step, is_step),
            (self.following, following),
        ):
            write_ring(array, self.num_rows, begin, values)
        self._record(numbers, chunks, firsts, lengths, has_ended, before)
        spare = going_on[~alone[going_on]]
        kept = len(self._free) - len(spare)
        spare_rows = np.array(self._free[kept:], np.int64)
        del self._free[kept:]
        self.following[(firsts + lengths - 1)[spare] % self.num_rows] = spare_rows
        opened.number[chunks.slot] = chunks.number
        opened.steps[chunks.slot] = chunks.t_started + lengths
        opened.chunk[chunks.slot] = np.where(has_ended, -1, numbers)
        self._open.pop(room.lane, None)
        if opened.chunk.max() >= 0:
            self._open[room.lane] = opened
        is_live = is_step
        if self.history:
            positions = np.arange(begin, self.end)
            step = positions - np.repeat(firsts, sizes)
            needed = np.minimum(np.repeat(chunks.t_started, sizes) + step, self.history)
            is_live = is_step & (self.back(np.where(is_step, positions, begin), self.history)[1] >= needed)
        write_ring(self.is_live, self.num_rows, begin, is_live)
        live = np.flatnonzero(is_live)
        live += begin
        self.num_live += len(live)
        self.inserted += int(lengths.sum())
        self.removed += int(lengths.sum()) - len(live)
        slots = len(opened.number)
        source = np.repeat((chunks.start - firsts + begin) * slots + chunks.slot, sizes)
        source += np.arange(0, total * slots, slots)
        room.begin, room.source, room.inserted, room.removed = begin, source, live, removed
        room.ended, room.rows = np.concatenate([lasts, spare]), np.concatenate([behind_rows, spare_rows])

    def _opened(self, lane: str, layout: FragmentLayout) -> OpenEpisodes:
        """The episodes that the slots of a lane are in."""
        opened = self._open.get(lane)
        if opened is not None and opened.layout is None and len(opened.number) == layout.num_slots:
            opened.layout = layout
        if opened is None or opened.layout is not layout:
            slots = layout.num_slots
            opened = OpenEpisodes(np.zeros(slots, np.int64), np.zeros(slots, np.int64), np.full(slots, -1), layout)
        return opened

    def _last_rows(self, chunks: Ints) -> Ints:
        """The rows of the last steps of chunks."""
        rows: Ints = (self.chunks.read("stop", chunks) - 1) % self.num_rows
        return rows

    def _record(
        self, numbers: Ints, chunks: ChunkIndex, firsts: Ints, lengths: Ints, has_ended: Bools, before: Ints
    ) -> None:
        table = self.chunks
        joins = before >= table.begin  # older ones have just been forgotten
        before = np.where(joins, before, -1)
        is_whole = chunks.t_started == 0
        is_whole[joins] = table.read("is_whole", before[joins])
        fields = {"first": firsts, "stop": firsts + lengths, "t_started": chunks.t_started, "before": before}
        after = np.full(len(numbers), -1)
        table.add(fields | {"after": after, "has_ended": has_ended, "is_whole": is_whole})
        table.write("after", before[joins], numbers[joins])
        self.following[self._last_rows(before[joins])] = firsts[joins] % self.num_rows

    def _evict(self, begin: int) -> Ints:
        """Forget positions below `begin`; the positions of live steps that are gone, i64[D]."""
        if begin <= self.begin:
            return np.empty(0, np.int64)
        following, is_step = (
            read_ring(array, self.num_rows, self.begin, begin) for array in (self.following, self.is_step)
        )
        self._free += following[following >= self.num_rows].tolist()
        after = following[is_step].astype(np.int64) if self.history else following
        removed = [self.begin + np.flatnonzero(read_ring(self.is_live, self.num_rows, self.begin, begin))]
        nothing = np.zeros(begin - self.begin, np.bool_)
        write_ring(self.is_live, self.num_rows, self.begin, nothing)
        write_ring(self.is_step, self.num_rows, self.begin, nothing)
        self.begin = begin
        self.chunks.forget(int(self._chunk[begin % self.num_rows]) if begin < self.end else self.chunks.end)
        for _ in range(self.history):  # steps that have lost what came before them
            after = after[after < self.num_rows]
            after = after[self.is_step[after]]
            removed.append(self.positions(after[self.is_live[after]]))
            self.is_live[after] = False
            after = self.following[after].astype(np.int64)
        positions = np.concatenate(removed)
        self.num_live -= len(positions)
        self.removed += len(positions)
        return positions

    # Checkpoints

    def get_state(self) -> dict[str, Any]:
        """The whole index, as plain values and arrays."""
        numbers = ("begin", "end", "num_live", "inserted", "removed")
        return {
            "counts": {name: getattr(self, name) for name in numbers},
            "is_live": self.is_live.copy(),
            "is_step": self.is_step.copy(),
            "following": self.following.copy(),
            "chunk": self._chunk.copy(),
            "free": list(self._free),
            "chunks": self.chunks.get_state(),
            "open": {
                lane: [opened.number.copy(), opened.steps.copy(), opened.chunk.copy()]
                for lane, opened in self._open.items()
            },
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Take what `get_state` gave, of an index of the same size."""
        for name, count in state["counts"].items():
            setattr(self, name, count)
        self.is_live[:], self.is_step[:] = state["is_live"], state["is_step"]
        self.following[:], self._chunk[:] = state["following"], state["chunk"]
        self._free = list(state["free"])
        self.chunks.set_state(state["chunks"])
        self._open = {lane: OpenEpisodes(*(each.copy() for each in fields)) for lane, fields in state["open"].items()}


_BLOCK_BYTES = 1 << 22
_PACKED_BYTES = 32  # of an item that stands in the packed records, at most
_PACKED = ""  # which is no column's name


@dataclass(frozen=True, slots=True)
class Storage:
    """How a replay keeps steps.

    path      of a new file to map into memory, for more than fits into RAM; None: in RAM. Its room on the disk is
              reserved, and it has no name once it is there: it goes with the process. Of several agents each module
              has a file of its own, with its id behind the name
    frames    newest observations that stand in each item of `obs` and `new_obs`, any[B, frames, ...], oldest first;
              zeros before the episode's first. They are put together when sampled. 1: the observation itself
    extra     names of the module's outputs to be kept; None: all

    Raises ValueError for a number of frames that is none, or below 1, and if `extra` is no tuple of names; TypeError
    for what is no path.
    """

    path: str | os.PathLike[str] | None = None
    frames: int = 1
    extra: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        checked_count("frames", self.frames, 1)
        if self.path is not None:
            os.fspath(self.path)
        check_names("extra", self.extra)


class RowColumns:
    """Columns with a row for each step, and further rows of observations alone.

    Small items of one row stand side by side in a packed record: reading a row then takes one place in memory, and not
    one for each column.

    items       name -> tree of arrays any[...] that one item is like
    num_rows    rows of every column
    spare       further rows of `obs`
    path        of a new file to map into memory; None: in RAM

    trees       name -> tree of arrays any[num_rows, ...]
    apart       names of the columns that are not packed

    Raises ReplayError if there is a file at the path, or none can be made.
    """

    def __init__(
        self, items: Mapping[str, Tree], num_rows: int, spare: int, path: str | os.PathLike[str] | None
    ) -> None:
        self.num_rows = num_rows
        self.apart = [name for name, item in items.items() if not _is_packed(name, item)]
        fields = [(name, item.dtype, item.shape) for name, item in items.items() if name not in self.apart]
        record = np.zeros((), np.dtype(sorted(fields, key=lambda field: -field[1].itemsize), align=True))
        sizes = {name: (items[name], num_rows + (spare if name == Columns.OBS else 0)) for name in self.apart}
        layout = BlockLayout(sizes | {_PACKED: (record, num_rows)})
        size = max(layout.size, 1)
        block = PrivateBlock(size).array() if path is None else _mapped(path, size)
        trees = {name: column.tree for name, column in layout.columns(block).items()}
        self._records, self._packed = trees.pop(_PACKED), [name for name, _, _ in fields]
        self.trees = {name: trees[name] if name in trees else self._records[name] for name in items}
        self._leaves = {name: leaves_of(tree) for name, tree in self.trees.items()}
        self._kinds = {name: kind_of(tree) for name, tree in self.trees.items()}

    @property
    def nbytes(self) -> int:
        """Bytes in all columns."""
        return sum(leaf.nbytes for leaves in self._leaves.values() for leaf in leaves)

    def check(self, columns: Mapping[str, Tree]) -> None:
        """Raise ReplayError if a fragment's columns, any[rows, N, ...], are of other names or kinds than these."""
        for name in self._kinds.keys() | columns.keys():
            own, tree = self._kinds.get(name), columns.get(name)
            other = None if tree is None else map_tree(lambda leaf: (leaf.dtype, leaf.shape[2:]), tree)
            if own != other:
                raise ReplayError(
                    f"column '{name}': the replay holds {own}, the fragment has {other}; expected fragments of one "
                    "kind: one replay for each kind of environment and module"
                )

    def write(self, begin: int, order: Ints, columns: Mapping[str, Tree]) -> None:
        """Write rows from position `begin` on: those of a fragment's columns, any[rows, N, ...], that `order` names.

        order    i64[R]: row * N + slot
        """
        for name, leaves in self._leaves.items():
            for leaf, source in zip(leaves, leaves_of(columns[name]), strict=True):
                _scatter(
                    leaf,
                    begin,
                    self.num_rows,
                    source.reshape(source.shape[0] * source.shape[1], *source.shape[2:]),
                    order,
                )

    def put(self, name: str, rows: Ints, values: Tree) -> None:
        """Write a tree of arrays any[R, ...] to rows, i64[R]."""
        for leaf, value in zip(self._leaves[name], leaves_of(values), strict=True):
            leaf[rows] = value

    def read(self, name: str, rows: NDArray[Any]) -> Tree:
        """The items in rows, whole numbers of any shape: a tree of new arrays any[*rows.shape, ...]."""
        tree = self.trees[name]
        if type(tree) is not np.ndarray:
            return map_tree(lambda leaf: leaf.take(rows, axis=0, mode="clip"), tree)
        return tree.take(rows, axis=0, mode="clip") if name in self.apart else self.read_packed(rows)[name]

    def read_packed(self, rows: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """The items of all packed columns in rows, whole numbers of any shape: new arrays any[*rows.shape, ...]."""
        found = self._records.take(rows, mode="clip")
        return {name: found[name].copy() for name in self._packed}

    @property
    def block_rows(self) -> int:
        """Rows of a block, which is what a checkpoint writes anew when one of its rows has changed."""
        return max(1, _BLOCK_BYTES * self.num_rows // max(self.nbytes, 1))

    def get_state(self, since: int, end: int, spare: Ints) -> dict[str, Any]:
        """The rows with positions from `since` to `end`, with all others in their blocks; as plain values and arrays.

        spare    i64[S]  the spare rows that are in use
        """
        size, used = self.block_rows, min(end, self.num_rows)
        changed = np.zeros(-(-used // size), np.bool_)
        changed[np.arange(max(since, end - used), end) % self.num_rows // size] = True
        return {
            "items": {name: map_tree(lambda leaf: leaf[0].copy(), tree) for name, tree in self.trees.items()},
            "block_rows": size,
            "num_blocks": len(changed),
            "blocks": {
                int(number): self._block(slice(number * size, min((number + 1) * size, used)))
                for number in np.flatnonzero(changed)
            },
            "spare": [spare, self.read(Columns.OBS, spare)],
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Take what `get_state` gave with all rows."""
        for number, block in state["blocks"].items():
            begin = number * state["block_rows"]
            for name, tree in block.items():
                for leaf, rows in zip(self._leaves[name], leaves_of(tree), strict=True):
                    leaf[begin : begin + len(rows)] = rows
        self.put(Columns.OBS, *state["spare"])

    def _block(self, rows: slice) -> dict[str, Tree]:
        """A copy of rows, with all columns."""
        return {name: map_tree(lambda leaf: leaf[rows].copy(), tree) for name, tree in self.trees.items()}


def _mapped(path: str | os.PathLike[str], size: int) -> NDArray[np.uint8]:
    """Memory u8[size] of a new file, which no longer has a name. Raises ReplayError if none can be made."""
    try:
        with open(path, "x+b") as file:
            os.unlink(path)
            os.posix_fallocate(file.fileno(), 0, size)  # a disk that is full later would end the process
            return np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)
    except FileExistsError:
        text = f"Storage(path={os.fspath(path)!r}): a file is there already, expected a path where nothing is"
        raise ReplayError(text) from None
    except OSError as error:
        text = f"Storage(path={os.fspath(path)!r}): a file of {size:,} bytes can't be made: {error.strerror}"
        raise ReplayError(text) from error


def columns_of(fragment: Fragment, extra: Sequence[str] | None) -> dict[str, Tree]:
    """The fragment's columns that a replay keeps: name -> tree of arrays any[H + rows, N, ...].

    extra    names of the extra model outputs to be kept; None: all of them

    A stateful module's `state_out` becomes `state_in`: the state before each step.

    Raises ReplayError for an output that is not there, and for states of which the one before a step is not known.
    """
    try:
        columns = fragment.stored_columns(extra, "which the replay is to keep")
    except ColumnError as error:
        raise ReplayError(str(error)) from None
    if Columns.STATE_OUT in columns:
        if ((fragment.chunks.start == 0) & (fragment.chunks.t_started > 0)).any():
            raise ReplayError(
                "the fragment has no step before its first ones, whose states are to be kept; expected a lookback of 1 "
                "or more: DatasetSource(path, lookback=1)"
            )
        columns[Columns.STATE_IN] = _states_before(columns.pop(Columns.STATE_OUT), fragment)
    return columns


def items_of(columns: Mapping[str, Tree]) -> dict[str, Tree]:
    """What one item of each column is like."""
    return {name: map_tree(lambda leaf: leaf[0, 0], tree) for name, tree in columns.items()}


def _is_packed(name: str, item: Tree) -> bool:
    """True for a column whose items, any[...], are small, and that has no rows of its own, as observations do."""
    is_array = isinstance(item, np.ndarray | np.generic)
    return is_array and name not in (Columns.OBS, Columns.STATE_IN) and item.nbytes <= _PACKED_BYTES


def _states_before(states: Tree, fragment: Fragment) -> Tree:
    """The state before each step, any[H + T, N, ...], from the one after it."""
    chunks = fragment.chunks
    begins = chunks.t_started == 0
    initial, known = fragment.initial_states(map_tree(lambda leaf: leaf[0, 0], states))
    if (begins & ~known).any():
        raise ReplayError(
            "the fragment does not record the state before its episodes' first steps, expected episodes with their "
            "initial_state"
        )

    def shifted(leaf: NDArray[Any], first: NDArray[Any]) -> NDArray[Any]:
        moved = np.zeros_like(leaf)
        moved[1:] = leaf[:-1]
        moved[chunks.start[begins], chunks.slot[begins]] = first[begins]
        return moved

    return map_tree(shifted, states, initial)


def _scatter(leaf: NDArray[Any], begin: int, num_rows: int, source: NDArray[Any], order: Ints) -> None:
    """Write the items of `source` that `order` names, round the end of the ring."""
    row = begin % num_rows
    before = min(len(order), num_rows - row)
    # Indices are valid, but for rows of observations alone: the other columns have nothing there.
    if leaf.flags.c_contiguous:
        source.take(order[:before], axis=0, out=leaf[row : row + before], mode="clip")
    else:
        leaf[row : row + before] = source.take(order[:before], axis=0, mode="clip")
    if before < len(order):
        _scatter(leaf, 0, num_rows, source, order[before:])
