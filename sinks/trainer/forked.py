"""Sockets that processes must not keep which are forked off a trainer: DataLoader's workers, as a rule.

They would hold the trainer's connections open when it is killed, and its address taken, until they notice. In them
/dev/null takes the place of each, so that its number does not come to stand for something else.
"""

import os
import socket
import weakref
from collections.abc import Iterator, Sequence
from typing import Protocol


class Holder(Protocol):
    """Has sockets that are this process's alone."""

    def filenos(self) -> Iterator[int]:
        """Their descriptors. Called in the process that was forked, whatever other threads were at."""
        ...


class Sockets:
    """Sockets that are listened on, before anybody is let in."""

    def __init__(self, sockets: Sequence[socket.socket]) -> None:
        self._sockets = sockets

    def filenos(self) -> Iterator[int]:
        """Their descriptors."""
        yield from [sock.fileno() for sock in self._sockets]


_holders: "weakref.WeakSet[Holder]" = weakref.WeakSet()


def keep_from_forked(holder: Holder) -> None:
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


os.register_at_fork(after_in_child=_give_up_all)
