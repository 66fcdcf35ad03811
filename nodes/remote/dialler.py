"""Connects to addresses, again and again, without waiting for any."""

import select
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

from rollflow.nodes.backoff import pause_s
from rollflow.nodes.remote.dial import REACH_S, Target, check_connected, dial, problem_of, targets_at_hand
from rollflow.nodes.remote.lookup import Lookup
from rollflow.stream.wire import Address

_LONGEST_REDIAL_S = 5.0


@dataclass(slots=True, eq=False)
class Dialled:
    """An address, and how far it has been reached.

    is_busy    whether a connection is there, or on its way
    problem    why there is no host yet; "": there is
    """

    address: Address
    due: float = 0.0
    failures: int = 0
    is_busy: bool = False
    problem: str = ""


class Dialler:
    """Dials addresses, and those whose connection was lost anew.

    epoll      is told of what there is to wait for; when it tells of one that is `in` this, `serve` is due
    reached    called with every connection that has come about, and with what was dialled
    """

    def __init__(
        self, addresses: Sequence[Address], epoll: select.epoll, reached: Callable[[socket.socket, Dialled], None]
    ) -> None:
        self._all = [Dialled(address) for address in addresses]
        self._calling: dict[int, tuple[socket.socket, Dialled, float]] = {}  # by descriptor, and how long it may take
        self._lookup: Lookup[Dialled] | None = None  # once there is a name
        self._epoll = epoll
        self._reached = reached

    def __contains__(self, fd: int) -> bool:
        return fd in self._calling or (self._lookup is not None and fd == self._lookup.fileno())

    @property
    def problems(self) -> list[str]:
        """Why addresses are not reached, or have no host for this gateway."""
        return [f"{dialled.address}: {dialled.problem}" for dialled in self._all if dialled.problem]

    def tick(self, now: float) -> None:
        """Do what is due."""
        for fd, (_, _, until) in list(self._calling.items()):
            if until <= now:
                self._give_up(fd, "no answer", now)
        for dialled in self._all:
            if not dialled.is_busy and dialled.due <= now:
                dialled.is_busy = True
                targets = targets_at_hand(dialled.address)
                if targets is None:
                    self._look_up(dialled)
                else:
                    self._call(dialled, targets, now)

    def serve(self, fd: int, now: float) -> None:
        """What was waited for has come to something."""
        if fd in self._calling:
            self._called(fd, now)
            return
        assert self._lookup is not None
        for dialled, found in self._lookup.answers():
            if isinstance(found, OSError):
                self._put_off(dialled, problem_of(found), now)
            else:
                self._call(dialled, found, now)

    def welcomed(self, dialled: Dialled | None) -> None:
        """The host at an address has been taken in."""
        if dialled is not None:
            dialled.failures, dialled.problem = 0, ""

    def lost(self, dialled: Dialled) -> None:
        """A connection that had come about is no more."""
        dialled.is_busy = False
        dialled.due = monotonic() + _delay(dialled)

    def close(self) -> None:
        """Dial no more; what is being looked up is waited for by nobody."""
        for sock, _, _ in self._calling.values():
            sock.close()
        self._calling.clear()
        self._lookup = None

    def _look_up(self, dialled: Dialled) -> None:
        if self._lookup is None:
            self._lookup = Lookup()
            self._epoll.register(self._lookup.fileno(), select.EPOLLIN)
        dialled.problem = dialled.problem or "no name server has said yet where this is"
        self._lookup.ask(dialled, dialled.address)

    def _call(self, dialled: Dialled, targets: Sequence[Target], now: float) -> None:
        try:
            sock = dial(targets[dialled.failures % len(targets)])
        except OSError as error:
            self._put_off(dialled, problem_of(error), now)
            return
        self._calling[sock.fileno()] = sock, dialled, now + REACH_S
        self._epoll.register(sock.fileno(), select.EPOLLOUT)

    def _called(self, fd: int, now: float) -> None:
        sock, dialled, _ = self._calling[fd]
        try:
            check_connected(sock)
        except OSError as error:
            self._give_up(fd, problem_of(error), now)
            return
        self._epoll.unregister(fd)
        del self._calling[fd]
        self._reached(sock, dialled)

    def _give_up(self, fd: int, why: str, now: float) -> None:
        sock, dialled, _ = self._calling.pop(fd)
        self._epoll.unregister(fd)
        sock.close()
        self._put_off(dialled, why, now)

    def _put_off(self, dialled: Dialled, why: str, now: float) -> None:
        dialled.problem = why
        dialled.is_busy = False
        dialled.due = now + _delay(dialled)


def _delay(dialled: Dialled) -> float:
    """Seconds until an address is dialled again: longer each time that it was in vain."""
    dialled.failures += 1
    return pause_s(dialled.failures, _LONGEST_REDIAL_S)
