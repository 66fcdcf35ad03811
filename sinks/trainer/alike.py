"""Train batches that go to a trainer as one: but for the episodes they tell of they differ in arrays' values alone."""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import optree
from numpy.typing import NDArray

from rollflow.sinks.trainer.item_message import is_batch, num_told
from rollflow.sinks.trainer.layout import Kind, Layout, laid_out, packed
from rollflow.stream.wire import EACH, Fragment, Joined, Series, bytes_of

MOST_ALIKE = 16  # so that those behind do not wait long for the first
MOST_BYTES = 1 << 20  # of them: larger ones gain nothing
_MOST_TOLD = 1 << 14  # returns of episodes in them: a header takes no end of values
_ALIGNMENT = 8  # as in a frame
_OWN = ("episodes",)  # entries of a message's rest in which it may differ


class Alike(NamedTuple):
    """Messages of train batches, one after the other.

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
        columns, rest = packed(self.spec, layout.leaves), _shared(first)
        each = [{name: message.rest[name] for name in _OWN if name in message.rest} for message in self.messages]
        if any(each):
            rest[EACH] = each
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
    if not is_batch(first):
        return None  # fragments differ in more: in their sequence, their episodes
    row, kinds, spec = _taken_apart(first)
    messages, rows, shared, told = [first], [row], _shared(first), num_told(first)
    size = sum([array.nbytes for array in row])
    for other in islice(others, max(0, most // max(1, size) - 1)):
        told += num_told(other)
        if other.lane != first.lane or _shared(other) != shared or told > _MOST_TOLD:
            break
        row, *form = _taken_apart(other)
        if form != [kinds, spec]:
            break
        messages.append(other)
        rows.append(row)
    return Alike(messages, rows, kinds, spec) if len(rows) > 1 else None


def _shared(message: Fragment) -> dict[str, Any]:
    """What others are to have in their rest as well."""
    return {name: value for name, value in message.rest.items() if name not in _OWN}


def _taken_apart(message: Fragment) -> tuple[list[NDArray[Any]], tuple[Kind, ...], optree.PyTreeSpec]:
    columns: Any = message.columns
    row, spec = optree.tree_flatten(columns, none_is_leaf=True)
    return row, tuple([(array.dtype, array.shape) for array in row]), spec
