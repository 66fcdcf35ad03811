"""Connecting to addresses: where a name leads is one thing, getting there another."""

import os
import select
import socket
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Any, NamedTuple

from rollflow.stream.bell import Bell
from rollflow.stream.wire import Address, UnixAddress

REACH_S = 10.0  # how long a connection may take to come about


class Target(NamedTuple):
    """Where to connect to, as the system wants it."""

    family: int
    kind: int
    protocol: int
    address: Any


def targets_at_hand(address: Address) -> list[Target] | None:
    """Where an address leads; None: it is a name, to be looked up."""
    if isinstance(address, UnixAddress):
        return [Target(socket.AF_UNIX, socket.SOCK_STREAM, 0, address.path)]
    try:
        return _found(address.host, address.port, socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return None


def look_up(address: Address) -> list[Target]:
    """Where an address leads; that may take as long as a name server likes. Raises OSError where it leads nowhere."""
    targets = targets_at_hand(address)
    if targets is not None:
        return targets
    assert not isinstance(address, UnixAddress)
    try:
        return _found(address.host, address.port)
    except UnicodeError as error:
        raise OSError(f"{address.host!r} is no name: {error}") from error


def dial(target: Target) -> socket.socket:
    """A non-blocking socket that is being connected. Raises OSError where that can't be."""
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
    """Raise OSError where a socket that was being connected has come to nothing."""
    problem = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if problem:
        raise OSError(problem, os.strerror(problem))


def reach(
    address: Address, attempt: int, bell: Bell | None = None, is_over: Callable[[], bool] = bool
) -> socket.socket:
    """A non-blocking socket that is connected; another attempt takes another of a name's targets.

    bell, is_over    whenever the bell rings, which is silenced, it is asked whether nobody wants a connection any more

    Raises OSError where that can't be, InterruptedError where it is over.
    """
    targets = look_up(address)
    sock = dial(targets[attempt % len(targets)])
    try:
        poll, until = select.poll(), monotonic() + REACH_S
        poll.register(sock.fileno(), select.POLLOUT)
        if bell is not None:
            poll.register(bell.fileno(), select.POLLIN)
        while sock.fileno() not in {fd for fd, _ in poll.poll(max(0.0, until - monotonic()) * 1e3)}:
            if bell is not None:
                bell.silence()
            if is_over():
                raise InterruptedError("given up before there was an answer")
            if monotonic() >= until:
                raise TimeoutError(f"no answer within {REACH_S:g} s")
        check_connected(sock)
    except BaseException:
        sock.close()
        raise
    return sock


def problem_of(error: OSError) -> str:
    """What is wrong, for people."""
    return error.strerror or str(error)


def _found(host: str, port: int, flags: int = 0) -> list[Target]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return [Target(family, kind, protocol, address) for family, kind, protocol, _, address in found]
