"""What goes to a trainer as one.

Train batches differ in their arrays' values alone, but for the episodes they tell of; fragments also in their lanes, in
where they are in these and in how their episodes began. Those that are lent lie alike, each in blocks of its own.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import optree
from numpy.typing import NDArray

from rollflow.sinks.trainer.item_message import is_batch, num_told
from rollflow.sinks.trainer.layout import Kind, Layout, laid_out, packed
from rollflow.stream.wire import EACH, LANE, Fragment, Joined, Lent, Series, bytes_of

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


class Alike(NamedTuple):
    """Messages of train batches or of fragments, one after the other.

    rows     the arrays of each
    kinds    dtype and shape of each array, the same in every row
    spec     the tree that they are of
    """

    messages: Sequence[Fragment]
    rows: Sequence[Sequence[NDArray[Any]]]
    kinds: tuple[Kind, ...]
    spec: optree.PyTreeSpec

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return len(self.rows) * sum([array.nbytes for array in self.rows[0]])

    def series(self, layout: Layout, blocks: tuple[int, ...], data: Joined | None) -> Series:
        """The messages as one, whose arrays lie in blocks or in `data`."""
        first = self.messages[0]
        columns, rest = packed(self.spec, layout.leaves), _rest_of(self.messages, _own_names(first))
        return Series(first.lane, first.number, len(self.rows), blocks, layout.size, columns, rest, data)

    def joined(self) -> Series:
        """The messages as one, their arrays in it: they must stay as they are until it is sent."""
        layout = laid_out(self.kinds, _ALIGNMENT)
        parts = [
            bytes_of(array, leaf.dtype)
            for row in self.rows
            for array, leaf in zip(row, layout.leaves, strict=True)
            if array.nbytes
        ]
        return self.series(layout, (), Joined(parts))


def alike(first: Fragment, others: Iterable[Fragment], most: int) -> Alike | None:
    """A message and those behind it that are as it is, of at most so many bytes; None: it goes by itself."""
    own = _own_names(first)
    if own is _OWN_OF_FRAGMENT and not _is_plain(first.rest):
        return None
    row, kinds, spec = _taken_apart(first)
    messages, rows, shared, told = [first], [row], _shared(first, own), num_told(first)
    size = sum([array.nbytes for array in row]) + sum([first.rest[name].nbytes for name in own if name in _ARRAYS])
    for other in islice(others, max(0, most // max(1, size) - 1)):
        told += num_told(other)
        if _shared(other, own) != shared or told > _MOST_TOLD:
            break
        row, *form = _taken_apart(other)
        if form != [kinds, spec]:
            break
        messages.append(other)
        rows.append(row)
    return Alike(messages, rows, kinds, spec) if len(rows) > 1 else None


def go_together(lent: Lent, other: Lent) -> bool:
    """Whether two fragments can go as one: they lie in the same places of as many blocks, and no column is a tree."""
    return (
        lent.columns == other.columns
        and len(lent.blocks) == len(other.blocks) > 0
        and _is_plain(lent.rest)
        and _is_plain(other.rest)
        and all(other.rest[name] == lent.rest[name] for name in _SHARED_BY_FRAGMENTS)
    )


def as_one(lent: Sequence[Lent]) -> Lent | Series:
    """Fragments that go together, each the next of their stream."""
    first = lent[0]
    if len(lent) == 1:
        return first
    blocks = tuple([number for each in lent for number in each.blocks])
    return Series(first.lane, first.number, len(lent), blocks, 0, first.columns, _rest_of(lent, _OWN_OF_FRAGMENT), None)


def _is_plain(rest: Mapping[str, Any]) -> bool:
    """Whether a fragment has nothing more to say than every one has, and no column of it is a tree."""
    return rest.keys() == _OF_ALL and not rest["forms"]


def _own_names(message: Fragment) -> tuple[str, ...]:
    """Entries of its rest in which others may differ."""
    return _OWN if is_batch(message) else _OWN_OF_FRAGMENT


def _rest_of(messages: Sequence[Fragment | Lent], own: Sequence[str]) -> dict[str, Any]:
    """The rest of a series of them: of all, and of each. They have the first one's layout where they have none."""
    first = messages[0]
    rest = {name: value for name, value in first.rest.items() if name not in own or name == _LAYOUT}
    each = [_own(message, first, own) for message in messages]
    if any(each):
        rest[EACH] = each
    return rest


def _own(message: Fragment | Lent, first: Fragment | Lent, names: Sequence[str]) -> dict[str, Any]:
    """What a message has for itself, when this is the first of its series."""
    own = {name: message.rest[name] for name in names if name in message.rest}
    if own.get(_LAYOUT) == first.rest.get(_LAYOUT):
        own.pop(_LAYOUT, None)
    if message.lane != first.lane:
        own[LANE] = message.lane
    return own


def _shared(message: Fragment | Lent, own: Container[str]) -> dict[str, Any]:
    """What others are to have in their rest as well."""
    return {name: value for name, value in message.rest.items() if name not in own}


def _taken_apart(message: Fragment) -> tuple[list[NDArray[Any]], tuple[Kind, ...], optree.PyTreeSpec]:
    columns: Any = message.columns
    row, spec = optree.tree_flatten(columns, none_is_leaf=True)
    return row, tuple([(array.dtype, array.shape) for array in row]), spec
