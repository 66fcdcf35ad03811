"""Connects to addresses, again and again, without waiting for any."""

import os
import select
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

from rollflow.nodes.backoff import pause_s
from rollflow.nodes.remote.remote_envs import dial
from rollflow.stream.wire import Address

_LONGEST_REDIAL_S = 5.0
_REACH_S = 10.0  # how long a connection may take to come about


@dataclass(slots=True, eq=False)
class Dialled:
    """An address, and how far it has been reached.

    is_busy    whether a connection is there, or on its way
    problem    why the last one did not come about; "": it did
    """

    address: Address
    due: float = 0.0
    failures: int = 0
    is_busy: bool = False
    problem: str = ""


class Dialler:
    """Dials addresses, and those whose connection was lost anew.

    epoll      is told of the sockets that are on their way; when it tells of one, `serve` is due
    reached    called with every connection that has come about, and with what was dialled
    calling    by descriptor: the sockets that are on their way, what was dialled, and how long that may take
    """

    def __init__(
        self, addresses: Sequence[Address], epoll: select.epoll, reached: Callable[[socket.socket, Dialled], None]
    ) -> None:
        self.calling: dict[int, tuple[socket.socket, Dialled, float]] = {}
        self._all = [Dialled(address) for address in addresses]
        self._epoll = epoll
        self._reached = reached

    @property
    def problems(self) -> list[str]:
        """Why addresses are not reached."""
        return [dialled.problem for dialled in self._all if dialled.problem]

    def tick(self, now: float) -> None:
        """Do what is due."""
        for fd, (_, _, until) in list(self.calling.items()):
            if until <= now:
                self._give_up(fd, "no answer", now)
        for dialled in self._all:
            if not dialled.is_busy and dialled.due <= now:
                self._dial(dialled, now)

    def serve(self, fd: int, now: float) -> None:
        """A socket that is on its way has come to something."""
        sock, dialled, _ = self.calling[fd]
        error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            self._give_up(fd, os.strerror(error), now)
            return
        self._epoll.unregister(fd)
        del self.calling[fd]
        dialled.problem = ""
        self._reached(sock, dialled)

    def welcomed(self, dialled: Dialled | None) -> None:
        """The host at an address has been taken in."""
        if dialled is not None:
            dialled.failures = 0

    def lost(self, dialled: Dialled) -> None:
        """A connection that had come about is no more."""
        dialled.is_busy = False
        dialled.due = monotonic() + _delay(dialled)

    def _dial(self, dialled: Dialled, now: float) -> None:
        dialled.is_busy = True
        try:
            sock = dial(dialled.address, dialled.failures)
        except OSError as error:
            self._put_off(dialled, error.strerror or str(error), now)
            return
        self.calling[sock.fileno()] = sock, dialled, now + _REACH_S
        self._epoll.register(sock.fileno(), select.EPOLLOUT)

    def _give_up(self, fd: int, why: str, now: float) -> None:
        sock, dialled, _ = self.calling.pop(fd)
        self._epoll.unregister(fd)
        sock.close()
        self._put_off(dialled, why, now)

    def _put_off(self, dialled: Dialled, why: str, now: float) -> None:
        dialled.problem = f"{dialled.address}: {why}"
        dialled.is_busy = False
        dialled.due = now + _delay(dialled)


def _delay(dialled: Dialled) -> float:
    """Seconds until an address is dialled again: longer each time that it was in vain."""
    dialled.failures += 1
    return pause_s(dialled.failures, _LONGEST_REDIAL_S)
