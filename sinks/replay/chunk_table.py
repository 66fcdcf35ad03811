"""Table of the chunks in a replay: a ring that grows, numbered in the order in which chunks came."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

CHUNK = np.dtype(
    [
        ("first", np.int64),  # position of the first transition
        ("stop", np.int64),  # position after the last one
        ("t_started", np.int64),  # steps of the episode before the first
        ("before", np.int64),  # number of the episode's chunk before, -1: there was none, or it was not kept
        ("after", np.int64),  # number of the episode's next chunk, -1: it has not come
        ("has_ended", np.bool_),  # whether the episode ended with this chunk
        ("is_whole", np.bool_),  # whether all steps of the episode before it were kept when it came
    ]
)


class ChunkTable:
    """Records of the chunks with numbers from `begin` to `end`; older ones are forgotten.

    Fields are read by chunk numbers: `table.read("stop", numbers)`.
    """

    def __init__(self) -> None:
        self.begin = self.end = 0
        self._records = np.zeros(1024, CHUNK)  # chunk number n stands in place n modulo the size, a power of two

    def read(self, field: str, numbers: Any) -> Any:
        """A field of the chunks with these numbers, which are all kept: an array of the shape of `numbers`."""
        return self._records[field][numbers & (len(self._records) - 1)]

    def write(self, field: str, numbers: Any, values: Any) -> None:
        """Set a field of the chunks with these numbers."""
        self._records[field][numbers & (len(self._records) - 1)] = values

    def add(self, count: int) -> Ints:
        """Numbers i64[count] of new chunks, whose fields are undefined."""
        size = len(self._records)
        while self.end + count - self.begin > size:
            size *= 2
        if size > len(self._records):
            kept = np.arange(self.begin, self.end)
            grown = np.zeros(size, CHUNK)
            grown[kept & (size - 1)] = self._records[kept & (len(self._records) - 1)]
            self._records = grown
        numbers = np.arange(self.end, self.end + count)
        self.end += count
        return numbers

    def forget(self, begin: int) -> None:
        """Forget the chunks with numbers below `begin`."""
        self.begin = begin

    def numbers(self) -> Ints:
        """The numbers i64[C] of all chunks that are kept, oldest first."""
        return np.arange(self.begin, self.end)

    def get_state(self) -> dict[str, Any]:
        """The records, as plain arrays by field."""
        kept = self.numbers()
        fields: dict[str, Any] = {name: self.read(name, kept).copy() for name in CHUNK.names or ()}
        return {"begin": self.begin, "end": self.end, "fields": fields}

    def set_state(self, state: dict[str, Any]) -> None:
        """Take the records of `get_state`."""
        self.begin = self.end = state["begin"]
        numbers = self.add(state["end"] - state["begin"])
        for name, values in state["fields"].items():
            self.write(name, numbers, values)
