"""Connecting to addresses: looking names up, and dialling what they stand for."""

import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, Generic, NamedTuple, TypeVar

from rollflow.stream.graph.wakeup import Wakeup
from rollflow.stream.wire import Address, UnixAddress

Asker = TypeVar("Asker")

REACH_S = 10.0  # how long a connection may take to come about
LOOK_S = 1.0  # between two looks at whether anybody waits still


class DialTarget(NamedTuple):
    """Socket address to connect to, in the system's terms."""

    family: int
    kind: int
    protocol: int
    address: Any


def targets_at_hand(address: Address) -> list[DialTarget] | None:
    """Targets of an address; None: it is a name, to be looked up."""
    if isinstance(address, UnixAddress):
        return [DialTarget(socket.AF_UNIX, socket.SOCK_STREAM, 0, address.path)]
    try:
        return _found(address.host, address.port, socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return None


def look_up(address: Address) -> list[DialTarget]:
    """Targets of an address, which may take as long as a name server likes. Raises OSError where there are none."""
    targets = targets_at_hand(address)
    if targets is not None:
        return targets
    assert not isinstance(address, UnixAddress)
    try:
        return _found(address.host, address.port)
    except UnicodeError as error:
        raise OSError(f"{address.host!r} is no name: {error}") from error


def dial(target: DialTarget) -> socket.socket:
    """Non-blocking socket that is being connected. Raises OSError where that can't be."""
    sock = socket.socket(target.family, target.kind, target.protocol)
    sock.setblocking(False)
    try:
        with suppress(BlockingIOError):
            sock.connect(target.address)
    except OSError:
        sock.close()
        raise
    return sock


def check_connected(sock: socket.socket) -> None:
    """Raise OSError where a socket could not be connected."""
    problem = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if problem:
        raise OSError(problem, os.strerror(problem))


def reach(
    address: Address,
    attempt: int,
    wakeup: Wakeup | None = None,
    is_over: Callable[[], bool] = bool,
    *,
    until: float | None = None,
    waiting: Callable[[], object] = bool,
) -> socket.socket:
    """Non-blocking socket that is connected; another attempt takes another of a name's targets.

    wakeup, is_over    whenever the wakeup rings, which is silenced, it is asked whether this is to end
    until              time by which a name is to be looked up, on the clock `monotonic`, or within `REACH_S` seconds
                       where that is later; None: it may take any time
    waiting            called every second or more often, while there is no answer

    Raises OSError where that can't be, InterruptedError where it is over.
    """
    wait = _Wait(wakeup, is_over, waiting)
    targets = targets_at_hand(address) or _looked_up(address, wait, until)
    sock = dial(targets[attempt % len(targets)])
    try:
        if not wait.lasts_until(sock.fileno(), select.POLLOUT, monotonic() + REACH_S):
            raise TimeoutError(f"no answer within {REACH_S:g} s")
        check_connected(sock)
    except BaseException:
        sock.close()
        raise
    return sock


def problem_of(error: OSError) -> str:
    """The text of an error, for people."""
    return error.strerror or str(error)


def _found(host: str, port: int, flags: int = 0) -> list[DialTarget]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return [DialTarget(family, kind, protocol, address) for family, kind, protocol, _, address in found]


class _Wait(NamedTuple):
    """Wait for a connection; for its fields see `reach`."""

    wakeup: Wakeup | None
    is_over: Callable[[], bool]
    waiting: Callable[[], object]

    def lasts_until(self, fd: int, event: int, until: float | None) -> bool:
        """True once a descriptor has an event, False after `until`. Raises InterruptedError where it is over."""
        poll = select.poll()
        poll.register(fd, event)
        if self.wakeup is not None:
            poll.register(self.wakeup.fileno(), select.POLLIN)
        while True:
            left = LOOK_S if until is None else min(LOOK_S, max(0.0, until - monotonic()))
            if fd in {ready for ready, _ in poll.poll(left * 1e3)}:
                return True
            if self.wakeup is not None:
                self.wakeup.silence()
            if self.is_over():
                raise InterruptedError("given up before there was an answer")
            self.waiting()
            if until is not None and monotonic() >= until:
                return False


def _looked_up(address: Address, wait: _Wait, until: float | None) -> list[DialTarget]:
    """Targets of a name. Raises OSError where it is not looked up in time."""
    lookup: Lookup[None] = Lookup()
    thread = lookup.ask(None, address)
    latest = None if until is None else max(until, monotonic() + REACH_S)
    if not wait.lasts_until(lookup.fileno(), select.POLLIN, latest):
        raise TimeoutError("no name server has said where this is")
    thread.join()
    [(_, found)] = lookup.answers()
    if isinstance(found, OSError):
        raise found
    return found


class Lookup(Generic[Asker]):
    """Lookup of names, each in a thread of its own, since the system's call blocks.

    Such a thread is not joined: it ends when the name server answers or the system gives up. It holds what it needs
    itself, since it may outlive this object.
    """

    def __init__(self) -> None:
        self._answered = Wakeup()
        self._answers: SimpleQueue[tuple[Asker, list[DialTarget] | OSError]] = SimpleQueue()

    def fileno(self) -> int:
        """Descriptor that can be read once `answers` has any."""
        return self._answered.fileno()

    def ask(self, asker: Asker, address: Address) -> threading.Thread:
        """Look an address up for somebody, in the thread that is returned."""
        work = asker, address, self._answers, self._answered
        thread = threading.Thread(target=_look_up, args=work, name=f"rollflow lookup {address}", daemon=True)
        thread.start()
        return thread

    def answers(self) -> Iterator[tuple[Asker, list[DialTarget] | OSError]]:
        """Answers since the last call: the asker, and the targets or the error."""
        self._answered.silence()
        while True:
            try:
                yield self._answers.get_nowait()
            except Empty:
                return


def _look_up(
    asker: Asker, address: Address, answers: "SimpleQueue[tuple[Asker, list[DialTarget] | OSError]]", answered: Wakeup
) -> None:
    try:
        answers.put((asker, look_up(address)))
    except OSError as error:
        answers.put((asker, error))
    answered.ring()
