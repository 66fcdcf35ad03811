"""How one thread tells another, which waits on descriptors, that something has happened."""

import os
import sys
import threading
import weakref

_ONE = (1).to_bytes(8, sys.byteorder)  # what an eventfd takes


class Bell:
    """A descriptor that can be read once `ring` has been called, by whatever thread, until `silence` is."""

    def __init__(self) -> None:
        if hasattr(os, "eventfd"):
            self._in = self._out = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        else:
            self._in, self._out = os.pipe()
            os.set_blocking(self._in, False)
            os.set_blocking(self._out, False)
        self._is_rung = False  # whether there is something to be read, which costs no call of the system to know
        self._lock = threading.RLock()
        self._closing = weakref.finalize(self, _close, {self._in, self._out})

    def fileno(self) -> int:
        """The descriptor."""
        return self._in

    def ring(self) -> None:
        """Make the descriptor readable; nothing once it is closed."""
        if self._is_rung:  # whoever silences it from now on looks at what this is rung for after that
            return
        with self._lock:
            if not self._is_rung and self._closing.alive:
                os.write(self._out, _ONE)
                self._is_rung = True

    def silence(self) -> None:
        """Make the descriptor unreadable; what is looked at after this includes all that was rung for before it."""
        with self._lock:
            if self._is_rung:
                os.read(self._in, 4096)
                self._is_rung = False

    def close(self) -> None:
        """Give the descriptors back."""
        with self._lock:
            self._closing()


def _close(fds: set[int]) -> None:
    for fd in fds:
        os.close(fd)
