"""Wakeup: a signal from any thread to a thread that waits on descriptors."""

import os
import socket
import sys
import threading
import weakref
from contextlib import ExitStack
from functools import partial

_ONE = (1).to_bytes(8, sys.byteorder)  # what an eventfd takes


class Wakeup:
    """A descriptor that is readable from a call of `ring`, in any thread, until `silence` is called."""

    def __init__(self) -> None:
        closing = ExitStack()
        if hasattr(os, "eventfd"):
            fd = self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            closing.callback(os.close, fd)
            self._write, self._read = partial(os.write, fd, _ONE), partial(os.read, fd, 4096)
        else:  # sockets: on some systems nothing else can be waited for
            there, here = map(closing.enter_context, socket.socketpair())
            there.setblocking(False)
            here.setblocking(False)
            self._fd = here.fileno()
            self._write, self._read = partial(there.send, _ONE), partial(here.recv, 4096)
        self._is_rung = False  # whether the descriptor is readable: saves system calls
        self._lock = threading.RLock()
        self._closing = weakref.finalize(self, closing.close)

    def fileno(self) -> int:
        """The descriptor."""
        return self._fd

    def ring(self) -> None:
        """Make the descriptor readable; does nothing once it is closed."""
        if self._is_rung:  # the thread that silences it will look for news only after that
            return
        with self._lock:
            if not self._is_rung and self._closing.alive:
                self._write()
                self._is_rung = True

    def silence(self) -> None:
        """Make the descriptor unreadable. To be called before looking for news, so that none is missed."""
        with self._lock:
            if self._is_rung:
                self._read()
                self._is_rung = False

    def close(self) -> None:
        """Close the descriptors."""
        with self._lock:
            self._closing()
