"""Connecting to addresses: looking names up, and dialling what they stand for."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

from rollflow.stream.graph.wakeup import Wakeup
from rollflow.stream.wire import Address, UnixAddress

Asker = TypeVar("Asker")

REACH_S = 10.0  # how long a connection may take to come about


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


def problem_of(error: OSError) -> str:
    """The text of an error, for people."""
    return error.strerror or str(error)


def _found(host: str, port: int, flags: int = 0) -> list[DialTarget]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return [DialTarget(family, kind, protocol, address) for family, kind, protocol, _, address in found]


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

    def ask(self, asker: Asker, address: Address) -> None:
        """Look an address up for somebody, in a thread."""
        work = asker, address, self._answers, self._answered
        threading.Thread(target=_look_up, args=work, name=f"rollflow lookup {address}", daemon=True).start()

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
