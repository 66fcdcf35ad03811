"""Processes that this one forks: they go on seeing what it had borrowed, and may read it after it has let go.

A pipe goes with each: as long as any of a child, and of its own children, is there, one end of it is open.
"""

import os
import threading
import weakref
from typing import Any, Protocol

from rollflow.sinks.trainer.shared.descriptor_transport import Descriptor

lock = threading.Lock()  # held while this process is forked, and while it is told what is over


class Debts(Protocol):
    """What has been borrowed."""

    def owed(self) -> set[int]:
        """Serial numbers of all loans that are not over."""
        ...


class _Child:
    """A forked process that is there, or its children.

    owed    what it may read
    """

    def __init__(self, life: int, owed: "weakref.WeakKeyDictionary[Any, set[int]]") -> None:
        self.owed = owed
        self._life = Descriptor(life)

    def is_over(self) -> bool:
        return self._life.is_hung_up()


_watched: "weakref.WeakSet[Any]" = weakref.WeakSet()
_children: list[_Child] = []
_pipe: tuple[int, int] | None = None  # while this process is forked
_is_registered = False


def watch(debts: Debts) -> None:
    """Keep what is owed now and later from being told to be over while a child may read it."""
    global _is_registered
    with lock:
        _watched.add(debts)
        if not _is_registered:
            _is_registered = True
            os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)


def inherited(debts: Debts) -> set[int]:
    """Serial numbers of loans that a child may read; with the lock held."""
    if not _children:
        return set()
    _children[:] = [child for child in _children if not child.is_over()]
    return set().union(*(child.owed.get(debts, ()) for child in _children))


def _before() -> None:
    global _pipe
    lock.acquire()
    if any(debts.owed() for debts in _watched):
        _pipe = os.pipe()


def _after_in_parent() -> None:
    global _pipe
    if _pipe is not None:
        mine, theirs = _pipe
        os.close(theirs)
        _children.append(_Child(mine, weakref.WeakKeyDictionary({debts: debts.owed() for debts in _watched})))
        _pipe = None
    lock.release()


def _after_in_child() -> None:
    global _pipe
    _children.clear()
    if _pipe is not None:
        os.close(_pipe[0])
        _pipe = None  # the other end is open for as long as this process lives
    lock.release()
