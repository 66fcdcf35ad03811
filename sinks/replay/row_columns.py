"""Row columns: the memory of a replay, one array per column leaf, in RAM or in a file mapped into memory."""

import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollflow.nodes.argument_checks import check_names, checked_count
from rollflow.sinks.replay.row_index import Ints
from rollflow.stream.data.blocks import BlockLayout, PrivateBlock
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ColumnError, ReplayError
from rollflow.stream.data.tree import Tree, kind_of, leaves_of, map_tree
from rollflow.stream.fragments.fragment import Fragment

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

    Raises ValueError for a number of frames that is none, or below 1, and where `extra` is no tuple of names; TypeError
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

    Raises ReplayError where there is a file at the path, or none can be made.
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
        """Raise ReplayError where a fragment's columns, any[rows, N, ...], are of other names or kinds than these."""
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
    """Memory u8[size] of a new file, which no longer has a name. Raises ReplayError where none can be made."""
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
