"""Frames on their way into a socket that is never waited for."""

import os
import selectors
import socket
import weakref
from collections import deque


class Outbox:
    """Sends what a socket has room for; keeps the rest, in order, until there is room again.

        sock        does not block; registered with `selector` to be read
        selector    is to tell of room as well, for as long as anything is kept: then `flush` is due

    Where the other end has gone, frames are dropped without a word: whoever reads the socket learns that it has.
    """

    def __init__(self, sock: socket.socket, selector: selectors.BaseSelector) -> None:
        self._sock = sock
        self._selector = selector
        self._kept: deque[tuple[memoryview, int]] = deque()  # what is left of a frame; the descriptor with it, or -1
        self._closing = weakref.finalize(self, _close, self._kept)

    def put(self, data: bytes, fd: int = -1) -> None:
        """Send a frame, and a descriptor with it, now or once there is room; it may be closed after this."""
        left = memoryview(data)
        if not self._kept:
            sent = self._send(left, fd)
            if sent == len(left):
                return
            left, fd = left[sent:], -1 if sent else fd
            self._watch(selectors.EVENT_READ | selectors.EVENT_WRITE)
        self._kept.append((left, -1 if fd < 0 else os.dup(fd)))

    def flush(self) -> None:
        """Send as much of what is kept as there is room for."""
        while self._kept:
            left, fd = self._kept[0]
            sent = self._send(left, fd)
            if not sent:
                return
            if fd >= 0:
                os.close(fd)
            if sent < len(left):
                self._kept[0] = left[sent:], -1
            else:
                self._kept.popleft()
        self._watch(selectors.EVENT_READ)

    def close(self) -> None:
        """Drop what is kept."""
        self._closing()

    def _send(self, data: memoryview, fd: int) -> int:
        """Bytes that the socket has taken, and the descriptor with the first of them; all where nobody will read it."""
        try:
            return self._sock.send(data) if fd < 0 else socket.send_fds(self._sock, [data], [fd])
        except BlockingIOError:
            return 0
        except (BrokenPipeError, ConnectionResetError):
            return len(data)

    def _watch(self, events: int) -> None:
        self._selector.modify(self._sock, events, self._selector.get_key(self._sock).data)


def _close(kept: deque[tuple[memoryview, int]]) -> None:
    while kept:
        _, fd = kept.popleft()
        if fd >= 0:
            os.close(fd)
