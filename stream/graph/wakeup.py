"""Wakeup: a signal from any thread to a thread that waits on descriptors."""

import os
import sys
import threading
import weakref

_ONE = (1).to_bytes(8, sys.byteorder)  # what an eventfd takes


class Wakeup:
    """A descriptor that is readable from a call of `ring`, in any thread, until `silence` is called."""

    def __init__(self) -> None:
        if hasattr(os, "eventfd"):
            self._in = self._out = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        else:
            self._in, self._out = os.pipe()
            os.set_blocking(self._in, False)
            os.set_blocking(self._out, False)
        self._is_rung = False  # whether the descriptor is readable: saves system calls
        self._lock = threading.RLock()
        self._closing = weakref.finalize(self, _close, {self._in, self._out})

    def fileno(self) -> int:
        """The descriptor."""
        return self._in

    def ring(self) -> None:
        """Make the descriptor readable; does nothing once it is closed."""
        if self._is_rung:  # the thread that silences it will look for news only after that
            return
        with self._lock:
            if not self._is_rung and self._closing.alive:
                os.write(self._out, _ONE)
                self._is_rung = True

    def silence(self) -> None:
        """Make the descriptor unreadable. To be called before looking for news, so that none is missed."""
        with self._lock:
            if self._is_rung:
                os.read(self._in, 4096)
                self._is_rung = False

    def close(self) -> None:
        """Close the descriptors."""
        with self._lock:
            self._closing()


def _close(fds: set[int]) -> None:
    for fd in fds:
        os.close(fd)
