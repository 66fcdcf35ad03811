"""Dialler of addresses, each again and again, that waits for none of them."""

import os
import select
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from time import monotonic
from typing import Any, TypeAlias

from rollflow.stream.data.closing import closing_on_error
from rollflow.stream.graph.wakeup import Wakeup
from rollflow.stream.net import backoff
from rollflow.stream.net.backoff import pause_s
from rollflow.stream.wire import Address, UnixAddress

DialTarget: TypeAlias = tuple[int, int, int, str, Any]  # as `getaddrinfo` has it


def targets_at_hand(address: Address) -> Sequence[DialTarget] | None:
    """Targets of an address; None: it is a name, to be looked up."""
    if isinstance(address, UnixAddress):
        return [(socket.AF_UNIX, socket.SOCK_STREAM, 0, "", address.path)]
    try:
        return _found(address.host, address.port, socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return None


def dial(target: DialTarget) -> socket.socket:
    """Non-blocking socket that is being connected. Raises OSError if that can't be."""
    *kind, _, address = target
    sock = socket.socket(*kind)
    sock.setblocking(False)
    with closing_on_error(sock.close), suppress(BlockingIOError):
        sock.connect(address)
    return sock


def problem_of(error: OSError) -> str:
    """The text of an error, for people."""
    return error.strerror or str(error)


def _found(host: str, port: int, flags: int = 0) -> Sequence[DialTarget]:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)


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


_Answers: TypeAlias = "SimpleQueue[tuple[Dialled, Sequence[DialTarget] | OSError]]"


def _look_up(dialled: Dialled, answers: "_Answers", answered: Wakeup) -> None:
    """Put in the targets of an address that is a name, which may take as long as a name server likes.

    In a thread that nobody joins: it ends when the name server answers or the system gives up.
    """
    address = dialled.address
    assert not isinstance(address, UnixAddress)
    try:
        answers.put((dialled, _found(address.host, address.port)))
    except UnicodeError as error:
        answers.put((dialled, OSError(f"{address.host!r} is no name: {error}")))
    except OSError as error:
        answers.put((dialled, error))
    answered.ring()


class Dialler:
    """Dials addresses, and those whose connection was lost anew.

    poll               waits for its descriptors; if one that is `in` this is ready, `serve` is due
    longest_pause_s    between two attempts at an address
    on_failure         called with the problem if an attempt has failed, or a connection is lost
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
        self._answered: Wakeup | None = None  # once there is a name, rung where one has been looked up
        self._answers: _Answers = SimpleQueue()
        self._poll = poll

    def __contains__(self, fd: int) -> bool:
        return fd in self._calling or (self._answered is not None and fd == self._answered.fileno())

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
            sock, dialled, _ = self._calling[fd]
            if problem := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self._give_up(fd, os.strerror(problem), now)
                return None
            self._poll.unregister(fd)
            del self._calling[fd]
            return sock, dialled
        assert self._answered is not None
        self._answered.silence()
        while not self._answers.empty():  # of which nobody else takes any
            dialled, found = self._answers.get()
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
        if self._answered is not None:
            self._poll.unregister(self._answered.fileno())
            self._answered = None

    def _look_up(self, dialled: Dialled) -> None:
        if self._answered is None:
            self._answered = Wakeup()
            self._poll.register(self._answered.fileno(), select.POLLIN)
        dialled.problem = dialled.problem or "no name server has said yet where this is"
        work, name = (dialled, self._answers, self._answered), f"rollflow lookup {dialled.address}"
        threading.Thread(target=_look_up, args=work, name=name, daemon=True).start()

    def _call(self, dialled: Dialled, targets: Sequence[DialTarget], now: float) -> None:
        try:
            sock = dial(targets[dialled.failures % len(targets)])
        except OSError as error:
            self._put_off(dialled, problem_of(error), now)
            return
        self._calling[sock.fileno()] = sock, dialled, now + backoff.times.reach_s
        self._poll.register(sock.fileno(), select.POLLOUT)

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
