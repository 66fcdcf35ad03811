"""A connection's bytes through a Unix socket, and descriptors among them."""

import array
import os
import select
import socket
import ssl
import weakref
from collections import deque
from itertools import islice
from typing import Any

from rollflow.nodes.remote.transport import Transport
from rollflow.stream.errors import WireError
from rollflow.stream.wire import Address, Broken, Connection, Event, Phase, SharedAddress

_MOST_READS = 64  # in a row, before others have their turn
_MOST_BUFFERS = 64  # sent at a time
_MOST_DESCRIPTORS = 64  # that come with what is received, or are sent, at a time
_MOST_UNCLAIMED = 1024  # that have come before what is said of them
_ROOM = socket.CMSG_SPACE(_MOST_DESCRIPTORS * array.array("i").itemsize)


def check_shared(address: Address, tls: ssl.SSLContext | None) -> None:
    """Raise WireError where what never leaves this host is to be encrypted."""
    if isinstance(address, SharedAddress) and tls is not None:
        raise WireError(f"address {str(address)!r} with tls: memory is not encrypted, expected tls=None", "tls")


class Descriptor:
    """A file descriptor of this process alone, which is closed when nobody refers to this any more."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._closing = weakref.finalize(self, os.close, fd)
        self._closing.atexit = False

    def is_hung_up(self) -> bool:
        """Of one end of a pipe: whether nobody has the other end any more."""
        poll = select.poll()
        poll.register(self.fd, 0)
        return bool(poll.poll(0))

    def taken(self) -> int:
        """The descriptor, for whoever closes it from now on."""
        self._closing.detach()
        return self.fd


class DescriptorTransport(Transport):
    """A `Transport` that hands descriptors over as well: each comes before the bytes that are sent after it."""

    def __init__(self, sock: socket.socket, connection: Connection) -> None:
        super().__init__(sock, connection)
        self._unsent_descriptors: deque[Descriptor] = deque()
        self._unclaimed: deque[Descriptor] = deque()

    def hand_over(self, descriptor: Descriptor) -> None:
        """Have a copy of a descriptor sent before anything that the connection is told from now on."""
        self._unsent_descriptors.append(descriptor)

    def claim(self) -> Descriptor:
        """The first descriptor that has come and was not claimed. Raises WireError where there is none."""
        if not self._unclaimed:
            raise WireError("no descriptor has come, expected one before what is said of it", "memory")
        return self._unclaimed.popleft()

    def read(self, now: float) -> list[Event]:
        """Receive what is there; what it comes to. Descriptors are there to be claimed."""
        events: list[Event] = []
        for _ in range(_MOST_READS):
            buffer = self.connection.buffer()
            room = len(buffer)
            try:
                count, told, flags, _ = self._sock.recvmsg_into([buffer], _ROOM, socket.MSG_CMSG_CLOEXEC)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                count, told, flags = 0, [], 0
            if told and (problem := self._keep(told, flags)):
                return [*events, problem]
            events += self.connection.filled(count, now) if count else self.connection.ended()
            if not count or not self.connection.is_open or count < room:
                break
        return events

    def close(self) -> None:
        """Close the socket, and every descriptor that nobody has claimed."""
        super().close()
        self._unclaimed.clear()
        self._unsent_descriptors.clear()

    def _keep(self, told: list[Any], flags: int) -> Broken | None:
        """Keep the descriptors that have come; what it means that there are too many."""
        for level, kind, data in told:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array.array("i")
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                self._unclaimed += map(Descriptor, fds)
        if flags & socket.MSG_CTRUNC:
            return self._refused("some descriptors got lost: this process has no more to spare")
        if len(self._unclaimed) > _MOST_UNCLAIMED or self.connection.phase is Phase.HANDSHAKE:
            return self._refused(f"{len(self._unclaimed)} descriptors that nobody has asked for, expected none")
        return None

    def _refused(self, problem: str) -> Broken:
        self.connection.refuse("memory", problem)
        assert self.connection.error is not None
        return Broken(self.connection.error)

    def _send(self) -> int:
        """Send from `_unsent`, and descriptors before it; how many bytes were sent."""
        total = 0
        while self._unsent and self._unsent_descriptors:
            handed = list(islice(self._unsent_descriptors, _MOST_DESCRIPTORS))
            fds = array.array("i", [descriptor.fd for descriptor in handed])
            begin = list(islice(self._unsent, _MOST_BUFFERS)) if len(handed) == len(self._unsent_descriptors) else []
            try:
                count = self._sock.sendmsg(
                    begin or [self._unsent[0][:1]], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)]
                )
            except (BlockingIOError, InterruptedError):
                return total
            except OSError:
                self._unsent.clear()
                return total
            for _ in handed:
                self._unsent_descriptors.popleft()
            self._take_off(count)
            total += count
        return total + super()._send()

    def _take_off(self, count: int) -> None:
        while self._unsent and count >= len(self._unsent[0]):
            count -= len(self._unsent.popleft())
        if count:
            self._unsent[0] = self._unsent[0][count:]
