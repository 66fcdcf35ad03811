"""A process that asks a trainer's stream for items, or tells it how far the loop is."""

import pickle
import socket
from contextlib import suppress
from time import monotonic, sleep
from types import TracebackType
from typing import Any, Self

from rollflow.nodes.backoff import pause_s
from rollflow.nodes.remote.dial import problem_of, reach
from rollflow.sinks.trainer import parcel
from rollflow.sinks.trainer.dataset_server import ASK, GIVE_BACK, HELLO, MOVE_ON, SAID, TAKE_UP, Given, Setup
from rollflow.sinks.trainer.told import Handed
from rollflow.stream.errors import RunError
from rollflow.stream.wire import UnixAddress

_LONGEST_PAUSE_S = 1.0
_LONGEST_ANSWER_S = 10.0
_MOST_READ = 1 << 16


class Asking:
    """A connection to a stream's dataset, until the block is left.

    join_timeout    seconds that the stream is waited for; None: for ever

    Raises RunError where it is not there.
    """

    def __init__(self, address: UnixAddress, join_timeout: float | None) -> None:
        self._sock = _reached(address, join_timeout)
        self._is_over = False  # the stream has been left, and nothing more is for us

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._sock.close()

    def begin(
        self, rank: int, worker: int, workers: int, prefetch: int, loop: tuple[int, int], *, is_followed: bool
    ) -> Setup:
        """Be one of those who ask for the items of a loop; how they are made."""
        self._sock.sendall(HELLO.pack(rank, worker, workers, prefetch, is_followed, *loop))
        setup: Setup = pickle.loads(self._answer())
        return setup

    def follow(self, rank: int) -> None:
        """Be the loop of a rank."""
        self._sock.sendall(HELLO.pack(rank, 0, 0, 0, True, 0, 0))

    def next_given(self, done: int, masked: int) -> Given | None:
        """What comes next; None where nothing does.

        done      how many of those before are done with, where the loop is not followed
        masked    steps of theirs that were masked since the last time

        Raises what the stream's loop would, and RunError where the stream has been left.
        """
        given: Given | None = self._asked(ASK, done, masked)
        return given

    def take_up(self, share: int, *, is_last: bool) -> list[Handed]:
        """Say that the loop is given something of a share; what that was made of. Raises as `next_given`."""
        told: list[Handed] | None = self._asked(TAKE_UP, share, is_last)
        self._is_over = self._is_over or told is None
        return told or []

    def move_on(self, share: int) -> None:
        """Say that the loop has moved on from a share; who has been left does not hear it."""
        try:
            self._sock.sendall(SAID.pack(MOVE_ON, share, 0))
        except OSError:
            return

    def give_back(self, share: int) -> None:
        """Say that the loop was not given what was taken up last, and end once that is known: an answer may be cut."""
        with suppress(OSError):
            self._sock.settimeout(_LONGEST_ANSWER_S)
            self._sock.sendall(SAID.pack(GIVE_BACK, share, 0))
            self._sock.shutdown(socket.SHUT_WR)
            while self._sock.recv(_MOST_READ):
                pass

    def _asked(self, kind: int, first: int, second: int) -> Any:
        if self._is_over:
            return None
        try:
            self._sock.sendall(SAID.pack(kind, first, second))
        except OSError:
            pass  # what was said last may still be read
        return self._answer()

    def _answer(self) -> Any:
        """What is answered. Raises it where it is an error, and RunError where the stream is gone."""
        try:
            answer = parcel.receive(self._sock)
        except (EOFError, OSError) as error:
            raise RunError("the stream was left before its dataset's loop") from error
        if isinstance(answer, Exception):
            raise answer
        return answer


def _reached(address: UnixAddress, join_timeout: float | None) -> socket.socket:
    began, failures = monotonic(), 0
    while True:
        try:
            sock = reach(address, failures)
        except OSError as error:
            if join_timeout is not None and monotonic() - began >= join_timeout:
                raise RunError(f"the stream's dataset is not at {address}: {problem_of(error)}") from error
            failures += 1
            sleep(pause_s(failures, _LONGEST_PAUSE_S))
            continue
        sock.setblocking(True)
        try:
            parcel.check_same_user(sock, str(address))
        except RunError:
            sock.close()
            raise
        return sock
