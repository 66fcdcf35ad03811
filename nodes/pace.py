"""How far a rollout may run ahead of whoever takes its fragments."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from rollflow.stream.gate import Gate


class Paced(Protocol):
    """A lane, here or in another process."""

    index: int

    @property
    def at_start(self) -> bool:
        """Whether its next step is the first of a fragment."""
        ...

    @property
    def sequence(self) -> int:
        """Number of that fragment."""
        ...


class FragmentCredits:
    """A gate that lets a lane begin a fragment while fewer than `limit` are begun and not yet done with.

    limit    None: always
    first    lanes that none begins its second fragment before, until they have begun their first, or were lost
    """

    def __init__(self, limit: int | None, *, first: Iterable[int] = ()) -> None:
        self.limit = limit
        self._yet_to_begin = set(first)
        self._begun = 0
        self._begun_by: dict[int, int] = {}  # lane -> its last fragment: a step that was lost is begun again
        self._changed: Callable[[], None] = nobody

    def admits(self, lane: Paced) -> bool:
        """Whether the lane may take its next step; the first of a fragment takes a credit."""
        if not lane.at_start or self.limit is None:
            return True
        fragment = lane.sequence
        if self._begun_by.get(lane.index) == fragment:
            return True
        if self._begun >= self.limit or (self._yet_to_begin and lane.index in self._begun_by):
            return False
        self._begun += 1
        self._begun_by[lane.index] = fragment
        self.wait_no_more(lane.index)
        return True

    def wait_no_more(self, lane: int) -> None:
        """A lane has begun its first fragment, or was lost before."""
        if lane in self._yet_to_begin:
            self._yet_to_begin.remove(lane)
            if not self._yet_to_begin:
                self._changed()

    def leave(self, lane: int) -> None:
        """The fragment that a lane has begun last never comes."""
        self.release(1)

    def release(self, fragments: int) -> None:
        """Say that so many fragments are done with. In the thread that the graph runs in."""
        self._begun -= fragments
        self._changed()

    def add(self, fragments: int) -> None:
        """Have so many more begun and not done with, or fewer. In the thread that the graph runs in."""
        if self.limit is not None:
            self.limit += fragments
            self._changed()

    def watch(self, changed: Callable[[], None]) -> None:
        """Take the function to be called when credits come back."""
        self._changed = changed


class AllOf:
    """A gate that lets a lane go on where every one of several gates does; the first that refuses is what holds it."""

    def __init__(self, gates: Sequence[Gate]) -> None:
        self._gates = gates
        self._refused: Gate | None = None  # the last time

    @property
    def holder(self) -> str | None:
        """The name of whoever holds the gate that refused last."""
        return getattr(self._refused, "holder", None)

    @property
    def wants_newest(self) -> bool:
        """Whether what is begun is to begin with the newest weights: one of the gates says so."""
        return any(getattr(gate, "wants_newest", False) for gate in self._gates)

    def admits(self, lane: Paced) -> bool:
        """Whether the lane may take its next step."""
        for gate in self._gates:
            if not gate.admits(lane):
                self._refused = gate
                return False
        return True

    def leave(self, lane: int) -> None:
        """The fragment that a lane has begun last never comes, and no other either."""
        for gate in self._gates:
            if hasattr(gate, "leave"):
                gate.leave(lane)

    def gone_unless(self, is_draining: Callable[[], bool], lane: int, fragments: int) -> None:
        """A lane is gone, and gives so many fragments in all: for good, unless all are to come to an end."""
        if is_draining():
            return
        for gate in self._gates:
            if hasattr(gate, "gone"):
                gate.gone(lane, fragments)

    def watch(self, changed: Callable[[], None]) -> None:
        """Take the function to be called when one of them has changed."""
        for gate in self._gates:
            gate.watch(changed)


def nobody() -> None:
    """Called when nobody watches."""


def nobody_knows(lane: int, fragments: int) -> None:
    """Called with lanes that are gone where there is no gate that would have to know."""


def nobody_waits(lane: int) -> None:
    """Called with lanes of which nothing comes where there is no gate that has let them begin it."""
