"""Messages that go to a trainer as one.

Train batches differ in their arrays' values alone, but for the episodes they tell of; fragments also in their lanes, in
where they are in these and in how their episodes began. Those that are lent lie alike, each in blocks of its own.
"""

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import optree
from numpy.typing import NDArray

from rollflow.sinks.trainer.messages.item_message import is_batch, num_told
from rollflow.stream import wire
from rollflow.stream.data.errors import ColumnError

Kind = tuple[np.dtype[Any], tuple[int, ...]]  # of an array: dtype and shape


class ArrayLayout(NamedTuple):
    """Arrays one behind the other.

    leaves    of each array: its dtype, little-endian, shape and place, in block 0
    size      bytes that they take
    """

    leaves: tuple[wire.LentLeaf, ...]
    size: int


@lru_cache(1024)
def laid_out(kinds: tuple[Kind, ...], alignment: int) -> ArrayLayout:
    """The layout of arrays of these kinds. Raises ColumnError for one that can't be sent."""
    leaves, offset = [], 0
    for dtype, shape in kinds:
        little = dtype.newbyteorder("<")
        if not wire.can_be_lent(little):
            raise ColumnError(f"a column of dtype {dtype} can't be sent, expected numbers or bool")
        leaves.append(wire.LentLeaf(little, shape, 0, offset))
        offset += -(-little.itemsize * math.prod(shape) // alignment) * alignment
    return ArrayLayout(tuple(leaves), offset)


@lru_cache(1024)
def packed(spec: optree.PyTreeSpec, leaves: tuple[wire.LentLeaf, ...]) -> bytes:
    """The packed places of a tree of arrays."""
    columns: Any = optree.tree_unflatten(spec, leaves)
    return wire.pack_columns(columns)


MOST_ALIKE = 16  # so that those behind do not wait long for the first
MOST_BYTES = 1 << 20  # of them: whoever keeps one keeps the message, or the block, that all came in
MOST_LENT = 1 << 22  # of those that are larger each, in shared memory; through a socket they gain nothing
_MOST_TOLD = 1 << 14  # returns of episodes in them: a header takes no end of values
_ALIGNMENT = 8  # as in a frame
_OWN = ("episodes",)  # entries of a train batch's rest in which it may differ
_LAYOUT = "layout"  # of each lane's fragments another, since their episodes are called otherwise
_ARRAYS = ("episode_start", "episode_number")
_OWN_OF_FRAGMENT = ("sequence", *_ARRAYS, _LAYOUT)
_SHARED_BY_FRAGMENTS = ("num_rows", "forms", "space")
_OF_ALL = frozenset((*_SHARED_BY_FRAGMENTS, *_OWN_OF_FRAGMENT))  # what has more to say goes by itself: it may be much


class MessageBatch(NamedTuple):
    """Messages of train batches or of fragments, one after the other.

    rows     the arrays of each
    kinds    dtype and shape of each array, the same in every row
    spec     the tree that they are of
    """

    messages: Sequence[wire.Fragment]
    rows: Sequence[Sequence[NDArray[Any]]]
    kinds: tuple[Kind, ...]
    spec: optree.PyTreeSpec

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return len(self.rows) * sum([array.nbytes for array in self.rows[0]])

    def series(self, layout: ArrayLayout, blocks: tuple[int, ...], data: wire.ScatterBytes | None) -> wire.Series:
        """The messages as one, whose arrays lie in blocks or in `data`."""
        first = self.messages[0]
        columns, rest = packed(self.spec, layout.leaves), _rest_of(self.messages, _own_names(first))
        return wire.Series(first.lane, first.number, len(self.rows), blocks, layout.size, columns, rest, data)

    def joined(self) -> wire.Series:
        """The messages as one, their arrays in it: they must stay as they are until it is sent."""
        layout = laid_out(self.kinds, _ALIGNMENT)
        parts = [
            wire.bytes_of(array, leaf.dtype)
            for row in self.rows
            for array, leaf in zip(row, layout.leaves, strict=True)
            if array.nbytes
        ]
        return self.series(layout, (), wire.ScatterBytes(parts))


def alike(first: wire.Fragment, others: Iterable[wire.Fragment], most: int) -> MessageBatch | None:
    """A message and those behind it that are as it is, of at most so many bytes; None: it goes by itself."""
    own = _own_names(first)
    if own is _OWN_OF_FRAGMENT and not _is_plain(first.rest):
        return None
    row, kinds, spec = _taken_apart(first)
    messages, rows, shared, returns = [first], [row], _shared(first, own), num_told(first)
    size = sum([array.nbytes for array in row]) + sum([first.rest[name].nbytes for name in own if name in _ARRAYS])
    for other in islice(others, max(0, most // max(1, size) - 1)):
        returns += num_told(other)
        if _shared(other, own) != shared or returns > _MOST_TOLD:
            break
        row, *form = _taken_apart(other)
        if form != [kinds, spec]:
            break
        messages.append(other)
        rows.append(row)
    return MessageBatch(messages, rows, kinds, spec) if len(rows) > 1 else None


def go_together(lent: wire.Lent, other: wire.Lent) -> bool:
    """True if two fragments can go as one: they lie alike in as many blocks, and no column is a tree."""
    return (
        lent.columns == other.columns
        and len(lent.blocks) == len(other.blocks) > 0
        and _is_plain(lent.rest)
        and _is_plain(other.rest)
        and all(other.rest[name] == lent.rest[name] for name in _SHARED_BY_FRAGMENTS)
    )


def as_one(lent: Sequence[wire.Lent]) -> wire.Lent | wire.Series:
    """Fragments that go together, each the next of their stream."""
    first = lent[0]
    if len(lent) == 1:
        return first
    blocks = tuple([number for each in lent for number in each.blocks])
    return wire.Series(
        first.lane, first.number, len(lent), blocks, 0, first.columns, _rest_of(lent, _OWN_OF_FRAGMENT), None
    )


def _is_plain(rest: Mapping[str, Any]) -> bool:
    """True if a fragment has no entries but those of every fragment, and no column is a tree."""
    return rest.keys() == _OF_ALL and not rest["forms"]


def _own_names(message: wire.Fragment) -> tuple[str, ...]:
    """Entries of its rest in which others may differ."""
    return _OWN if is_batch(message) else _OWN_OF_FRAGMENT


def _rest_of(messages: Sequence[wire.Fragment | wire.Lent], own: Sequence[str]) -> dict[str, Any]:
    """The rest of a series of them: of all, and of each. They have the first one's layout where they have none."""
    first = messages[0]
    rest = {name: value for name, value in first.rest.items() if name not in own or name == _LAYOUT}
    each = [_own(message, first, own) for message in messages]
    if any(each):
        rest[wire.EACH] = each
    return rest


def _own(message: wire.Fragment | wire.Lent, first: wire.Fragment | wire.Lent, names: Sequence[str]) -> dict[str, Any]:
    """A message's own entries in a series that begins with `first`."""
    own = {name: message.rest[name] for name in names if name in message.rest}
    if own.get(_LAYOUT) == first.rest.get(_LAYOUT):
        own.pop(_LAYOUT, None)
    if message.lane != first.lane:
        own[wire.LANE] = message.lane
    return own


def _shared(message: wire.Fragment | wire.Lent, own: Container[str]) -> dict[str, Any]:
    """The entries of a rest that other messages are to have as well."""
    return {name: value for name, value in message.rest.items() if name not in own}


def _taken_apart(message: wire.Fragment) -> tuple[list[NDArray[Any]], tuple[Kind, ...], optree.PyTreeSpec]:
    columns: Any = message.columns
    row, spec = optree.tree_flatten(columns, none_is_leaf=True)
    return row, tuple([(array.dtype, array.shape) for array in row]), spec
