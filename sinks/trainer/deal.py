"""Who of a trainer's processes gets which item, and when a rollout may know that all have moved on from it."""

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from rollflow.sinks.trainer.source import Arrived


@dataclass(slots=True, eq=False)
class _Round:
    """One share for every rank.

    left    how many of them somebody has not moved on from
    """

    left: int
    items: list[Arrived]


@dataclass(slots=True, eq=False)
class Share:
    """What goes to one rank as one.

    number        in the order in which they are dealt
    items         that came from rollouts
    was_handed    whether somebody got it before
    """

    number: int
    items: Sequence[Arrived]
    round: _Round
    was_handed: bool = False


@dataclass(slots=True)
class _Lap:
    """What a worker has of one loop.

    own     meant for it
    held    given to it, and not done with
    done    how many it was given before these
    """

    own: deque[Share] = field(default_factory=deque)
    held: deque[Share] = field(default_factory=deque)
    done: int = 0


class Hand:
    """What one rank gets, by its workers in turn: a `DataLoader` asks for the items of a loop in that order.

    has_ended    whether a worker was told that no more comes: how far the loop is can't be known any more
    """

    def __init__(self, moved_on: Callable[[Share], None]) -> None:
        self.has_ended = False
        self._moved_on = moved_on
        self._undealt: deque[Share] = deque()
        self._loop: Hashable = None
        self._laps: list[_Lap] = [_Lap()]
        self._turn = 0

    def begin(self, loop: Hashable, workers: int) -> bool:
        """Somebody of a loop with so many workers is there; whether it is another loop, which gets what is left."""
        if loop == self._loop:
            return False
        self.finish()
        for worker in range(len(self._laps)):
            self.leave(worker)
        self._loop, self._laps, self._turn, self.has_ended = loop, [_Lap() for _ in range(workers)], 0, False
        return True

    def add(self, share: Share) -> None:
        """Take a share in."""
        self._undealt.append(share)

    def take(self, worker: int) -> Share | None:
        """A worker's next share; None where there is none."""
        lap = self._laps[worker]
        while not lap.own:
            if not self._undealt:
                return None
            self._laps[self._turn].own.append(self._undealt.popleft())
            self._turn = (self._turn + 1) % len(self._laps)
        lap.held.append(lap.own.popleft())
        return lap.held[-1]

    def be_done_with(self, worker: int, count: int) -> None:
        """The loop has moved on from the first `count` that a worker was given."""
        lap = self._laps[worker]
        while lap.held and lap.done < count and not self.has_ended:
            lap.done += 1
            self._moved_on(lap.held.popleft())

    def leave(self, worker: int) -> None:
        """A worker is gone: what it had is for others, unless the loop has ended."""
        lap = self._laps[worker]
        left = [*lap.own, *(() if self.has_ended else lap.held)]
        self._undealt = deque(sorted([*left, *self._undealt], key=lambda share: share.number))
        self._laps[worker] = _Lap(held=lap.held) if self.has_ended else _Lap()

    def finish(self) -> None:
        """The loop has moved on from all that it was given, where it has ended."""
        for lap in self._laps if self.has_ended else ():
            while lap.held:
                self._moved_on(lap.held.popleft())


class Deal:
    """Deals items to ranks, round by round, so that each gets as many.

    done     called with what a round was made of, once all ranks have moved on from it

    hands    one for each rank
    """

    def __init__(self, world_size: int, done: Callable[[Sequence[Arrived]], None]) -> None:
        self.hands = [Hand(self._moved_on) for _ in range(world_size)]
        self._done = done
        self._forming: list[Sequence[Arrived]] = []
        self._left_out: list[Arrived] = []
        self._number = 0

    def add(self, items: Sequence[Arrived], left_out: Sequence[Arrived] = ()) -> None:
        """Take in what one rank is to get; it is dealt when there is as much for every other.

        left_out    what nobody gets, and is done with when this round is
        """
        self._forming.append(items)
        self._left_out += left_out
        if len(self._forming) == len(self.hands):
            forming, left_out = self._forming, self._left_out
            self._forming, self._left_out = [], []
            whole = _Round(len(forming), [*chain(*forming), *left_out])
            for hand, each in zip(self.hands, forming, strict=True):
                self._number += 1
                hand.add(Share(self._number, each, whole))

    def left_over(self) -> Iterator[Sequence[Arrived]]:
        """What came and does not make a whole round; it is done with."""
        forming, self._forming = self._forming, []
        self._done(self._left_out)
        for items in forming:
            self._done(items)
            yield items

    def finish(self) -> None:
        """Every loop that has ended has moved on from all that it was given."""
        for hand in self.hands:
            hand.finish()

    def _moved_on(self, share: Share) -> None:
        share.round.left -= 1
        if not share.round.left:
            self._done(share.round.items)
