"""Ledger of lost transitions: fragments that a run still holds when it ends count as lost, with the cause.

Every part of a run that may hold items has a method `held()`: channels, chains, inlets and outlets, and nodes that keep
items. When a run ends, it asks all of them. Each fragment has an `Origin`, which counts its transitions as lost at most
once, at the rollout that cut it.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rollflow.stream.data.tree import leaves_of

CLOSED = "closed"  # the run, or the rollout, was left, cancelled or interrupted
FAILED = "failed"  # an error ended the run
DROPPED = "dropped"  # the only edge that the item went over dropped it


class Ledger:
    """Counts a rollout's transitions from the cut of their fragment on.

    cut_steps    transitions in the fragments that were cut
    ending       how the run has ended, `closed` or `failed`; None: it has not ended
    lost         transitions in lost fragments, by cause
    trace        has a method `cut`, which is told of every fragment as well; None: nothing is traced
    """

    def __init__(self) -> None:
        self.cut_steps = 0
        self.ending: str | None = None
        self.lost: Counter[str] = Counter()
        self.trace: Any = None

    def cut(self, fragment: Any) -> None:
        """Count a fragment that leaves the rollout, and set its `origin`."""
        steps = fragment.num_steps
        self.cut_steps += steps
        fragment.origin = Origin(self, steps, (fragment.lane, fragment.sequence))
        trace = self.trace
        if trace is not None:
            trace.cut(fragment)

    def end(self, cause: str) -> None:
        """Record how the run has ended; only the first call counts."""
        self.ending = self.ending or cause

    def lost_of(self, made: int) -> Counter[str]:
        """Lost transitions by cause, of `made` in all; includes those that were not cut when the run ended."""
        if self.ending is None:
            return self.lost
        return self.lost + Counter({self.ending: made - self.cut_steps})


class Origin:
    """Link from a fragment to the ledger that counts its transitions if they are lost.

    ledger    of the rollout that has cut the fragment, and of no other
    steps     transitions in the fragment
    name      lane of the fragment, and its number there
    """

    __slots__ = ("_is_lost", "ledger", "name", "steps")

    def __init__(self, ledger: Ledger, steps: int, name: tuple[int, int]) -> None:
        self.steps, self.name = steps, name
        self.ledger = ledger
        self._is_lost = False

    def lose(self, cause: str) -> None:
        """Count the transitions as lost; only the first call counts."""
        if not self._is_lost:
            self._is_lost = True
            self.ledger.lost[cause] += self.steps


class BatchOrigins:
    """Table from train batches to the origins of their fragments, kept while a batch is alive. Thread-safe."""

    def __init__(self) -> None:
        self._entries: tuple[tuple[list[weakref.ref[Any]], tuple[Origin, ...]], ...] = ()

    def note(self, batch: Mapping[Any, Any], fragments: Iterable[Any]) -> None:
        """Remember the fragments that a batch was made of; the batch is recognized by its arrays."""
        origins = tuple(origin for fragment in fragments for origin in origins_of(fragment))
        leaves = [weakref.ref(leaf) for leaf in leaves_of(dict(batch)) if type(leaf).__weakrefoffset__]
        alive = [entry for entry in self._entries if all(leaf() is not None for leaf in entry[0])]
        if origins and leaves:
            alive.append((leaves, origins))
        self._entries = tuple(alive)

    def of(self, batch: Any) -> Iterator[Origin]:
        """The origins of a batch's fragments; none for anything but a whole batch that was noted."""
        if not isinstance(batch, Mapping):
            return
        ids = set(map(id, leaves_of(dict(batch))))
        for leaves, origins in self._entries:
            if all(id(leaf()) in ids for leaf in leaves):
                yield from origins


Makers = Sequence[Callable[[Any], Iterable[Origin]]]
"""Methods `origins_of` of nodes that make batches: they give the origins of a batch's fragments."""


def origins_of(item: Any, makers: Makers = ()) -> Iterator[Origin]:
    """The origins of an item: a fragment, a batch that one of the makers has made, or a sequence of these."""
    if isinstance(item, list | tuple):
        for each in item:
            yield from origins_of(each, makers)
    elif (origin := getattr(item, "origin", None)) is not None:
        if isinstance(origin, Origin):
            yield origin
    else:
        for of_batch in makers:
            yield from of_batch(item)


def lose(item: Any, cause: str, makers: Makers) -> None:
    """Count an item, as `origins_of` takes it, as lost."""
    for origin in origins_of(item, makers):
        origin.lose(cause)


def cause_of(error: BaseException | None) -> str:
    """The cause of losses in a run that `error` has ended; a cancellation counts as `closed`."""
    return FAILED if isinstance(error, Exception) else CLOSED
