"""Dialler of addresses, each again and again, that waits for none of them."""

import select
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import TypeAlias

from rollflow.stream.net.backoff import pause_s
from rollflow.stream.net.dial import REACH_S, DialTarget, Lookup, check_connected, dial, problem_of, targets_at_hand
from rollflow.stream.wire import Address

SocketPoll: TypeAlias = "select.poll | select.epoll"


@dataclass(slots=True, eq=False)
class Dialled:
    """An address, and how far it has been reached.

    is_busy    whether a connection is there, or on its way
    problem    why nobody there has been taken in yet; "": somebody has
    """

    address: Address
    due: float = 0.0
    failures: int = 0
    is_busy: bool = False
    problem: str = ""


class Dialler:
    """Dials addresses, and those whose connection was lost anew.

    poll               waits for its descriptors; where one that is `in` this is ready, `serve` is due
    longest_pause_s    between two attempts at an address
    on_failure         called with the problem where an attempt has failed, or a connection is lost
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        poll: SocketPoll,
        longest_pause_s: float = 5.0,
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        self._all = [Dialled(address) for address in addresses]
        self._longest_pause_s, self._on_failure = longest_pause_s, on_failure
        self._calling: dict[int, tuple[socket.socket, Dialled, float]] = {}  # by descriptor, and how long it may take
        self._lookup: Lookup[Dialled] | None = None  # once there is a name
        self._poll = poll

    def __contains__(self, fd: int) -> bool:
        return fd in self._calling or (self._lookup is not None and fd == self._lookup.fileno())

    @property
    def due(self) -> float | None:
        """Time at which `tick` is to be called; None: it need not be."""
        calls = [until for _, _, until in self._calling.values()]
        return min([*calls, *(dialled.due for dialled in self._all if not dialled.is_busy)], default=None)

    @property
    def problems(self) -> list[str]:
        """Why addresses are not reached, or nobody there has been taken in."""
        return [f"{dialled.address}: {dialled.problem}" for dialled in self._all if dialled.problem]

    def tick(self, now: float) -> None:
        """Dial what is due, and give up what has not answered in time."""
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

    def serve(self, fd: int, now: float) -> tuple[socket.socket, Dialled] | None:
        """A connection that has come about by a descriptor that is ready, and its address; None: there is none yet."""
        if fd in self._calling:
            return self._connected(fd, now)
        assert self._lookup is not None
        for dialled, found in self._lookup.answers():
            if isinstance(found, OSError):
                self._put_off(dialled, problem_of(found), now)
            else:
                self._call(dialled, found, now)
        return None

    def welcomed(self, dialled: Dialled | None) -> None:
        """Note that the other end at an address has been taken in."""
        if dialled is not None:
            dialled.failures, dialled.problem = 0, ""

    def lost(self, dialled: Dialled) -> None:
        """Dial an address again whose connection is no more."""
        self._put_off(dialled, dialled.problem, monotonic())

    def close(self) -> None:
        """Dial no more, and wait for no lookup."""
        for fd, (sock, _, _) in self._calling.items():
            self._poll.unregister(fd)
            sock.close()
        self._calling.clear()
        if self._lookup is not None:
            self._poll.unregister(self._lookup.fileno())
            self._lookup = None

    def _look_up(self, dialled: Dialled) -> None:
        if self._lookup is None:
            self._lookup = Lookup()
            self._poll.register(self._lookup.fileno(), select.POLLIN)
        dialled.problem = dialled.problem or "no name server has said yet where this is"
        self._lookup.ask(dialled, dialled.address)

    def _call(self, dialled: Dialled, targets: Sequence[DialTarget], now: float) -> None:
        try:
            sock = dial(targets[dialled.failures % len(targets)])
        except OSError as error:
            self._put_off(dialled, problem_of(error), now)
            return
        self._calling[sock.fileno()] = sock, dialled, now + REACH_S
        self._poll.register(sock.fileno(), select.POLLOUT)

    def _connected(self, fd: int, now: float) -> tuple[socket.socket, Dialled] | None:
        sock, dialled, _ = self._calling[fd]
        try:
            check_connected(sock)
        except OSError as error:
            self._give_up(fd, problem_of(error), now)
            return None
        self._poll.unregister(fd)
        del self._calling[fd]
        return sock, dialled

    def _give_up(self, fd: int, reason: str, now: float) -> None:
        sock, dialled, _ = self._calling.pop(fd)
        self._poll.unregister(fd)
        sock.close()
        self._put_off(dialled, reason, now)

    def _put_off(self, dialled: Dialled, problem: str, now: float) -> None:
        """Dial an address later: after a longer time whenever it was in vain."""
        dialled.problem, dialled.is_busy = problem, False
        dialled.failures += 1
        dialled.due = now + pause_s(dialled.failures, self._longest_pause_s)
        if self._on_failure is not None:
            self._on_failure(problem)
