"""Transport of a connection's bytes through a Unix socket, and of descriptors among them."""

import array
import os
import select
import socket
import weakref
from collections import deque
from collections.abc import Callable
from itertools import islice

from rollflow.stream.data.errors import WireError
from rollflow.stream.net.transport import Transport
from rollflow.stream.wire import Connection, ConnectionPhase

_MOST_BUFFERS = 64  # sent at a time
_MOST_DESCRIPTORS = 64  # that come with what is received, or are sent, at a time
_MOST_UNCLAIMED = 1024  # that have come before the message about them
_ROOM = getattr(socket, "CMSG_SPACE", int)(_MOST_DESCRIPTORS * array.array("i").itemsize)


class Descriptor:
    """File descriptor of this process alone, which is closed when nothing refers to this object any more."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._closing = weakref.finalize(self, os.close, fd)
        self._closing.atexit = False

    def is_hung_up(self) -> bool:
        """True for an end of a pipe whose other end is closed everywhere."""
        poll = select.poll()
        poll.register(self.fd, 0)
        return bool(poll.poll(0))

    def taken(self) -> int:
        """The descriptor, which the caller closes from now on."""
        self._closing.detach()
        return self.fd


class DescriptorTransport(Transport):
    """`Transport` that carries descriptors as well: each comes before the bytes that are sent after it."""

    def __init__(self, sock: socket.socket, connection: Connection) -> None:
        super().__init__(sock, connection)
        self._unsent_descriptors: deque[Descriptor] = deque()
        self._unclaimed: deque[Descriptor] = deque()

    def hand_over(self, descriptor: Descriptor) -> None:
        """Send a copy of a descriptor before anything that the connection sends from now on."""
        self._unsent_descriptors.append(descriptor)

    def claim(self) -> Descriptor:
        """Take the first descriptor that has come and was not claimed. Raises WireError if there is none."""
        if not self._unclaimed:
            raise WireError("no descriptor has come, expected one before what is said of it", "memory")
        return self._unclaimed.popleft()

    def close(self, until: Callable[[], float] | None = None) -> None:
        """Close the socket, as `Transport` does, and every descriptor that was not claimed."""
        super().close(until)
        self._unclaimed.clear()
        self._unsent_descriptors.clear()

    def _receive(self, buffer: memoryview) -> int:
        """Receive bytes, and keep the descriptors that come with them, or refuse them if there are too many."""
        count, ancillary, flags, _ = self._sock.recvmsg_into([buffer], _ROOM, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array.array("i")
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                self._unclaimed += map(Descriptor, fds)
        if flags & socket.MSG_CTRUNC:
            self.connection.refuse("memory", "some descriptors got lost: this process has no more to spare")
        elif ancillary and (
            len(self._unclaimed) > _MOST_UNCLAIMED or self.connection.phase is ConnectionPhase.HANDSHAKE
        ):
            text = f"{len(self._unclaimed)} descriptors that nobody has asked for, expected none"
            self.connection.refuse("memory", text)
        return count

    def _send_some(self, most: int) -> int:
        """Send at most so many bytes, descriptors first; the number of bytes sent."""
        if not self._unsent_descriptors:
            return super()._send_some(most)
        handed = list(islice(self._unsent_descriptors, _MOST_DESCRIPTORS))
        fds = array.array("i", [descriptor.fd for descriptor in handed])
        are_all = len(handed) == len(self._unsent_descriptors)
        begin = list(islice(self._unsent, _MOST_BUFFERS)) if are_all else [self._unsent[0][:1]]
        count = self._sock.sendmsg(begin, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        for _ in handed:
            self._unsent_descriptors.popleft()
        return count
