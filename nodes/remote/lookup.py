"""Asks where names lead, without waiting for an answer."""

import threading
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from rollflow.nodes.remote.dial import Target, look_up
from rollflow.stream.bell import Bell
from rollflow.stream.wire import Address

Asker = TypeVar("Asker")


class Lookup(Generic[Asker]):
    """Where the names of addresses lead: each is looked up in a thread of its own, since the system can only wait.

    Nobody waits for such a thread, which ends when the name server answers or the system gives it up. What it needs for
    that it holds itself: it may find that whoever has asked is gone.
    """

    def __init__(self) -> None:
        self._bell = Bell()
        self._answers: SimpleQueue[tuple[Asker, list[Target] | OSError]] = SimpleQueue()

    def fileno(self) -> int:
        """Can be read once `answers` has any."""
        return self._bell.fileno()

    def ask(self, asker: Asker, address: Address) -> None:
        """Have an address looked up for somebody."""
        work = asker, address, self._answers, self._bell
        threading.Thread(target=_look_up, args=work, name=f"rollflow lookup {address}", daemon=True).start()

    def answers(self) -> Iterator[tuple[Asker, list[Target] | OSError]]:
        """Who has asked, and where the name leads or why nowhere."""
        self._bell.silence()
        while True:
            try:
                yield self._answers.get_nowait()
            except Empty:
                return


def _look_up(
    asker: Asker, address: Address, answers: "SimpleQueue[tuple[Asker, list[Target] | OSError]]", bell: Bell
) -> None:
    try:
        answers.put((asker, look_up(address)))
    except OSError as error:
        answers.put((asker, error))
    bell.ring()
