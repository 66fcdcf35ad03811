"""What a loop over a rollout has taken, and what it has handed to its reader."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar


class Emitted(Protocol):
    """A fragment, of one agent or several."""

    lane: int
    sequence: int

    @property
    def num_steps(self) -> int:
        """Transitions in it."""
        ...

    @property
    def is_empty(self) -> bool:
        """Whether it tells of nothing."""
        ...


F = TypeVar("F", bound=Emitted)


class Rounds(Generic[F]):
    """Takes fragments from the ring a round at a time, one for every lane, and hands them out.

        size       fragments in a round
        lag        leaves out what is too old: when it comes, and again when it is handed out
        returns    is told of every fragment

        handed_steps    transitions handed out

    A reader that leaves its loop in the middle of a round finds the rest of it in its next loop. A round is given back
    to the ring, which may then go on, when the next one is asked for.
    """

    def __init__(self, size: int, lag: Any, returns: Callable[[F], None]) -> None:
        self.size = size
        self.handed_steps = 0
        self._lag = lag
        self._returns = returns
        self._waiting: deque[F] = deque()
        self._taken = 0  # of the ring, and not given back

    @property
    def is_empty(self) -> bool:
        """Whether all of the round has been handed out."""
        return not self._waiting

    @property
    def is_full(self) -> bool:
        """Whether the round has all its fragments."""
        return len(self._waiting) >= self.size

    def give_back(self, release: Callable[[int], None]) -> None:
        """Let the ring go on: the reader is done with the round before."""
        taken, self._taken = self._taken, 0
        if taken:
            release(taken)

    def take(self, fragment: F, release: Callable[[int], None]) -> None:
        """Take a fragment of the ring; one that is empty, or too old, is given back at once."""
        self._returns(fragment)
        if not fragment.is_empty and self._lag.admits(fragment):
            self._waiting.append(fragment)
            self._taken += 1
        else:
            release(1)

    def hand_out(self) -> Iterator[F]:
        """The fragments of the round, but for those that have become too old meanwhile."""
        while self._waiting:
            fragment = self._waiting.popleft()
            if self._lag.admits(fragment):
                self.handed_steps += fragment.num_steps
                yield fragment
