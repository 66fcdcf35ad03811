"""Lookers: who looks at the runs of this process through a port that one of them has anyway, and looking elsewhere."""

import json
import logging
import secrets
import ssl
import threading
from functools import partial
from time import monotonic
from typing import Any

from rollflow.stream import wire
from rollflow.stream.data.errors import WireError, error_field
from rollflow.stream.net.dial import problem_of, reach
from rollflow.stream.net.socket_loop import SocketLoop
from rollflow.stream.net.sockets import Peer
from rollflow.stream.net.transport import transport_for
from rollflow.stream.snapshots.run_socket import snapshots_here
from rollflow.stream.wire.codec.standing import MOST_JSON

logger = logging.getLogger(__name__)

_ANSWER_S = 10.0  # that the other end has for an answer
MOST_LOOKERS = 16  # at once
_END_S = 2.0  # that an answer has which is under way at the end


class Lookers:
    """Answers to those that look. An answer is made in a thread: what is looked at may stand still, or be waited for.

    loop    that has the sockets
    """

    def __init__(self, loop: SocketLoop[Any]) -> None:
        self._loop = loop
        self._answering: dict[wire.Acceptor, threading.Thread] = {}

    def welcome(self, connection: wire.Acceptor, name: str) -> None:
        """Welcome a looker, which has proved itself. Its name is for the log. Raises WireError for one too many."""
        if sum(peer.connection.is_looked_at for peer in self._loop.peers) >= MOST_LOOKERS:
            raise WireError(f"{MOST_LOOKERS} others look at the runs of this process, expected fewer", "busy")
        connection.welcome_looker()
        logger.info("%s looks at the runs of this process", name)

    def answer(self, connection: wire.Acceptor) -> None:
        """Send a looker the snapshots of all runs of this process, unless that is under way. In the loop's thread."""
        if connection not in self._answering:
            thread = threading.Thread(target=self._answer, args=(connection,), name="rollflow looker", daemon=True)
            self._answering[connection] = thread
            thread.start()

    def close(self) -> None:
        """Wait until no answer is under way, for a while."""
        until = monotonic() + _END_S
        for thread in list(self._answering.values()):
            thread.join(max(0.0, until - monotonic()))

    def _answer(self, connection: wire.Acceptor) -> None:
        try:
            tell = partial(connection.show, _shown())
        except Exception as error:  # a run can't say what it is at, or says too much
            tell = partial(connection.refuse, "message", error_field(error))
        try:
            with self._loop.lock:
                peer = self._loop.peers.of(connection)
                if peer is not None:
                    try:
                        tell()
                    except WireError as error:  # it takes no frame as large, or is gone
                        connection.refuse(error.code, str(error))
                    self._loop.peers.write(peer)
        finally:
            self._answering.pop(connection, None)
            self._loop.wakeup.ring()


def _shown() -> wire.Snapshots:
    """Snapshots of the runs of this process. Raises WireError where they are too much for a message."""
    found = wire.Snapshots(json.dumps(snapshots_here()))
    if len(found.json) > MOST_JSON:
        raise WireError(f"snapshots of {len(found.json)} characters, expected {MOST_JSON} at most")
    return found


class _Look:
    """Handler of one look: what it is told, or the error that it ended with."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] | None = None

    def handle(self, peer: Peer[wire.LookerConnection], event: wire.Message, now: float) -> None:
        """Take a message of the other end."""
        match event:
            case wire.Welcome():
                peer.connection.tell(wire.Inspect(0))
            case wire.Snapshots():
                self.found = event.runs()
            case wire.Goodbye():
                raise WireError(f"it said goodbye: {event.reason}", "lost")

    def fail(self, peer: Peer[wire.LookerConnection], error: Exception, now: float) -> None:
        """Raise the error."""
        peer.connection.refuse(getattr(error, "code", "message"), str(error))
        raise error


def look_at(address: str, *, secret: bytes | None, tls: ssl.SSLContext | None, software: str) -> list[dict[str, Any]]:
    """Snapshots of the runs of the process that listens on an address: a rollout's for hosts, or a trainer's.

    software    name of what looks, for people

    Raises WireError where it refuses, does not answer within ten seconds, or says what it must not, and OSError where
    it can't be reached.
    """
    target = wire.parse_trainer_address(address)
    wire.check_secret(target, secret)
    limits, until, look = wire.Limits(), monotonic() + _ANSWER_S, _Look()
    try:
        sock = reach(target, 0, until=until)
    except OSError as error:
        raise ConnectionError(f"{address}: {problem_of(error)}") from error
    connection = wire.LookerConnection(software, secrets.token_bytes, secret=secret, limits=limits, now=monotonic())
    peer = Peer(transport_for(sock, connection, tls, dialled=target), connection, address)
    loop: SocketLoop[Peer[wire.LookerConnection]] = SocketLoop(look)
    try:
        loop.add(peer)
        while look.found is None:
            loop.send(lambda peer: None)
            ready = loop.wait_until(until)
            if monotonic() >= until:
                raise WireError(f"{address} has not answered within {_ANSWER_S:g} s", "silent")
            loop.serve(ready, monotonic())
            loop.tick(monotonic())
        connection.goodbye("it has looked")
        loop.drop(peer)
    finally:
        loop.close()
    return [{**run, "path": f"{address}#{place}"} for place, run in enumerate(look.found)]
