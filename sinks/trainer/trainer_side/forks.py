"""Forked processes of a trainer, as a rule a DataLoader's workers: sockets and borrowed memory that they inherit.

They must not keep the trainer's sockets: they would hold its connections open when it is killed, and its address taken.
In them /dev/null takes the place of each, so that its number does not come to stand for something else.

They go on seeing what the trainer had borrowed, and may read it after it has let go. A pipe goes with each: as long as
any of a child, and of its own children, is there, one end of it is open.
"""

import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

from rollflow.stream.data.system import at_fork
from rollflow.stream.net.descriptor_transport import Descriptor


class SocketHolder(Protocol):
    """Has sockets that are this process's alone."""

    def filenos(self) -> Iterator[int]:
        """Their descriptors. Called in the process that was forked, whatever other threads were at."""
        ...


_holders: "weakref.WeakSet[SocketHolder]" = weakref.WeakSet()


def keep_from_forked(holder: SocketHolder) -> None:
    """From now on have forked processes give a holder's sockets up, for as long as it is there."""
    _holders.add(holder)


def _give_up_all() -> None:
    fds = [fd for holder in list(_holders) for fd in holder.filenos() if fd >= 0]
    if not fds:
        return
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in fds:
        os.dup2(nothing, fd, inheritable=False)
    os.close(nothing)


at_fork(after_in_child=_give_up_all)


lock = threading.Lock()  # held while this process is forked, and while it is told what is over


class BorrowedBlocks(Protocol):
    """Blocks that have been borrowed."""

    def owed(self) -> set[int]:
        """Serial numbers of all loans that are not over."""
        ...


_watched: "weakref.WeakSet[Any]" = weakref.WeakSet()
# Of every forked process: an end of its pipe, and what it, or its children, may read.
_children: list[tuple[Descriptor, weakref.WeakKeyDictionary[BorrowedBlocks, set[int]]]] = []
_pipe: tuple[int, int] | None = None  # while this process is forked
_is_registered = False


def watch(debts: BorrowedBlocks) -> None:
    """Keep what is owed now and later from being told to be over while a child may read it."""
    global _is_registered
    with lock:
        _watched.add(debts)
        if not _is_registered:
            _is_registered = True
            at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)


def inherited(debts: BorrowedBlocks) -> set[int]:
    """Serial numbers of loans that a child may read; with the lock held."""
    if not _children:
        return set()
    _children[:] = [child for child in _children if not child[0].is_hung_up()]
    return set().union(*(owed.get(debts, ()) for _, owed in _children))


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
        owed = weakref.WeakKeyDictionary({debts: debts.owed() for debts in _watched})
        _children.append((Descriptor(mine), owed))
        _pipe = None
    lock.release()


def _after_in_child() -> None:
    global _pipe
    _children.clear()
    if _pipe is not None:
        os.close(_pipe[0])
        _pipe = None  # the other end is open for as long as this process lives
    lock.release()
