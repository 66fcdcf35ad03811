"""Table of the chunks in a replay: a ring that grows, numbered in the order in which chunks came."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_DTYPES = {
    "first": np.int64,  # position of the first transition
    "stop": np.int64,  # position after the last one
    "t_started": np.int64,  # steps of the episode before the first
    "before": np.int64,  # number of the episode's chunk before, -1: there was none, or it was not kept
    "after": np.int64,  # number of the episode's next chunk, -1: it has not come
    "has_ended": np.bool_,  # whether the episode ended with this chunk
    "is_whole": np.bool_,  # whether all steps of the episode before it were kept when it came
}


class ChunkTable:
    """Records of the chunks with numbers from `begin` to `end`; older ones are forgotten.

    Fields are read by chunk numbers: `table.read("stop", numbers)`.
    """

    def __init__(self) -> None:
        self.begin = self.end = 0
        self._size = 1024  # a power of two: chunk number n stands in place n modulo this
        self._fields: dict[str, NDArray[Any]] = {name: np.zeros(self._size, dtype) for name, dtype in _DTYPES.items()}

    def read(self, field: str, numbers: Any) -> Any:
        """A field of the chunks with these numbers, which are all kept: an array of the shape of `numbers`."""
        return self._fields[field][numbers & (self._size - 1)]

    def write(self, field: str, numbers: Any, values: Any) -> None:
        """Set a field of the chunks with these numbers."""
        self._fields[field][numbers & (self._size - 1)] = values

    def add(self, fields: Mapping[str, NDArray[Any]]) -> None:
        """Add chunks, with the numbers from `end` on.

        fields    name -> values of all, any[count]
        """
        count = len(fields["first"])
        size = self._size
        while self.end + count - self.begin > size:
            size *= 2
        if size > self._size:
            kept = self.numbers()
            for name, values in self._fields.items():
                grown = np.zeros(size, values.dtype)
                grown[kept & (size - 1)] = values[kept & (self._size - 1)]
                self._fields[name] = grown
            self._size = size
        first = self.end & (size - 1)
        before = min(count, size - first)
        for name, values in fields.items():
            self._fields[name][first : first + before] = values[:before]
            self._fields[name][: count - before] = values[before:]
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
        fields: dict[str, Any] = {name: self.read(name, kept) for name in _DTYPES}
        return {"begin": self.begin, "end": self.end, "fields": fields}

    def set_state(self, state: dict[str, Any]) -> None:
        """Take the records of `get_state`."""
        self.begin = self.end = state["begin"]
        self.add(state["fields"])
