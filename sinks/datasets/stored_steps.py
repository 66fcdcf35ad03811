"""Steps as they are read from files: in the order in which they lie there, and by a thread that reads ahead."""

import math
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from rollflow.stream.data.tree import Tree, concatenate_trees, leaves_of, map_tree

Ints = NDArray[np.int64]
T = TypeVar("T")

_JOINED_BYTES = 512  # of a row: larger ones stay in their parts, since to join them takes as long as to take them


class StoredSteps:
    """Steps of K episodes in parts, such as row groups. What is taken is copied once, from there to where it is used.

    parts       name -> the column's parts, trees of arrays any[m, ...]; all columns have parts of the same m
    rows        i64[S]    the row of each step, counted over all parts, episode by episode
    last_obs    tree of arrays any[K, ...], the observation behind each episode's last step; None: not read
    initial     tree of arrays any[K, ...], the state before each episode's first step, and bool[K] of those that are
                known; None: not read, or of no stateful module
    """

    def __init__(
        self,
        parts: Mapping[str, Sequence[Tree]],
        rows: Ints,
        last_obs: Tree | None,
        initial: tuple[Tree, NDArray[np.bool_]] | None = None,
    ) -> None:
        self.parts = {name: list(trees) for name, trees in parts.items()}
        self.rows, self.last_obs, self.initial = rows, last_obs, initial
        sizes = [len(leaves_of(tree)[0]) for tree in next(iter(self.parts.values()))]
        self._firsts: Ints = np.cumsum([0, *sizes])  # of each part, and behind the last

    def after(self, front: "StoredSteps") -> "StoredSteps":
        """These steps behind others."""
        parts = {name: [*front.parts[name], *trees] for name, trees in self.parts.items()}
        rows = np.concatenate([front.rows, self.rows + front._firsts[-1]])
        lasts = None if self.last_obs is None else concatenate_trees([front.last_obs, self.last_obs])
        initial = None
        if front.initial is not None and self.initial is not None:
            (before, were_known), (after, are_known) = front.initial, self.initial
            initial = concatenate_trees([before, after]), np.concatenate([were_known, are_known])
        return StoredSteps(parts, rows, lasts, initial)

    def join(self) -> None:
        """Put the parts of columns with small rows end to end, from which steps are taken faster."""
        for name, trees in self.parts.items():
            if len(trees) > 1 and self.row_bytes(name) <= _JOINED_BYTES:
                self.parts[name] = [concatenate_trees(trees)]

    def row_bytes(self, name: str) -> int:
        """Bytes of one step in a column."""
        return sum(leaf.itemsize * math.prod(leaf.shape[1:]) for leaf in leaves_of(self.parts[name][0]))

    def write(self, name: str, steps: Ints, value: Any) -> None:
        """Set the value of some steps, i64[n], in a column of numbers."""
        tree = self.parts[name] = [np.concatenate(self.parts[name])]
        tree[0][self.rows[steps]] = value

    def taken(self, name: str, steps: Ints | slice = slice(None)) -> Tree:
        """A column's values at some steps, i64[n] or a slice of all: a tree of new arrays any[n, ...]."""
        rows, trees = self.rows[steps], self.parts[name]
        if len(trees) == 1:
            # All rows are there; the mode "raise" would check each of them first.
            return map_tree(lambda leaf: leaf.take(rows, axis=0, mode="clip"), trees[0])
        values = map_tree(lambda leaf: np.empty((len(rows), *leaf.shape[1:]), leaf.dtype), trees[0])
        part = np.searchsorted(self._firsts, rows, "right") - 1
        ends = np.flatnonzero((np.diff(rows) != 1) | (np.diff(part) != 0)) + 1
        for begin, end in pairwise([0, *ends.tolist(), len(rows)] if len(rows) else []):
            at = int(part[begin])
            first = int(rows[begin] - self._firsts[at])
            map_tree(lambda leaf, value, b=begin, e=end, f=first: _copy(leaf, f, value[b:e]), trees[at], values)
        return values


class _NotWanted(BaseException):
    """Raised in a thread that reads ahead, where nobody wants any more what it reads."""


class ReadAhead(threading.Thread, Generic[T]):
    """A thread that reads something while others work on what came before.

    read    gives it, and calls `check_wanted` now and then
    """

    def __init__(self, read: Callable[[], T]) -> None:
        super().__init__(name="rollflow-dataset")
        self._read, self.is_wanted = read, True
        self._made: list[T] = []
        self._error: BaseException | None = None
        with suppress(RuntimeError):  # the interpreter is at its end, and starts no more threads
            self.start()

    def run(self) -> None:
        """Read it."""
        try:
            self._made.append(self._read())
        except _NotWanted:
            pass
        except BaseException as error:
            self._error = error

    def result(self) -> T:
        """Wait for what was read. Raises what reading it has raised."""
        if self.ident is None:
            self.run()
        else:
            self.join()
        if self._error is not None:
            raise self._error
        return self._made.pop()

    def stop(self) -> None:
        """Wait until the thread has ended, which reads no further."""
        self.is_wanted = False
        if self.ident is not None:
            self.join()


def check_wanted() -> None:
    """End a thread that reads ahead, where nobody wants any more what it reads; else do nothing."""
    thread = threading.current_thread()
    if isinstance(thread, ReadAhead) and not thread.is_wanted:
        raise _NotWanted


def in_pairs(reads: Sequence[Callable[[], T]]) -> Generator[T, None, None]:
    """What each of some functions gives, in their order. Two at a time are at work, every second one in a thread."""
    for at in range(0, len(reads), 2):
        check_wanted()
        beside = ReadAhead(reads[at + 1]) if at + 1 < len(reads) else None
        try:
            yield reads[at]()
            if beside is not None:
                yield beside.result()
        finally:
            if beside is not None:
                beside.stop()


def _copy(leaf: NDArray[Any], first: int, into: NDArray[Any]) -> None:
    into[:] = leaf[first : first + len(into)]
