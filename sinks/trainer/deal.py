"""Who of a trainer's processes gets which item, and when a rollout may know that all have moved on from it."""

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from rollflow.sinks.trainer.source import Arrived
from rollflow.stream.errors import RunError


@dataclass(slots=True, eq=False)
class _Round:
    """One share for every rank.

    left        how many of them somebody has not moved on from
    left_out    what nobody gets of what came between them
    """

    left: int
    left_out: Sequence[Arrived]
    shares: list["Share"] = field(default_factory=list)

    @property
    def items(self) -> list[Arrived]:
        """All of it."""
        return [*chain.from_iterable(share.items for share in self.shares), *self.left_out]

    @property
    def taken(self) -> list[Arrived]:
        """What loops have been given of it."""
        if all(share.is_taken for share in self.shares):
            return self.items
        return list(chain.from_iterable(share.items for share in self.shares if share.is_taken))


@dataclass(slots=True, eq=False)
class Share:
    """What goes to one rank as one.

    number        in the order in which they are dealt
    items         that came from rollouts
    was_handed    whether somebody got it before
    is_taken      whether a loop is known to have been given all of it
    """

    number: int
    items: Sequence[Arrived]
    round: _Round
    was_handed: bool = False
    is_taken: bool = False


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

    A loop that is followed says itself what it was given, and what it has moved on from. Of others that is found from
    what their workers ask for.

    has_ended    whether a worker was told that no more comes: how far a loop is that is not followed can't be known any
                 more
    """

    def __init__(self, moved_on: Callable[[Share], None]) -> None:
        self.has_ended = self._is_followed = False
        self._current: Share | None = None  # that a loop is at which is followed
        self._moved_on = moved_on
        self._undealt: deque[Share] = deque()
        self._loop: Hashable = None
        self._laps: list[_Lap] = [_Lap()]
        self._turn = 0

    @property
    def is_empty(self) -> bool:
        """Whether all has been given to somebody."""
        return not self._undealt and not any(lap.own for lap in self._laps)

    def begin(self, loop: Hashable, workers: int, *, is_followed: bool = False) -> bool:
        """Somebody of a loop with so many workers is there; whether it is another loop, which gets what is left."""
        if loop == self._loop:
            return False
        self.finish()
        self.move_on()
        if self._is_followed:
            self.has_ended = False  # what the loop has not taken is left
        self._is_followed = is_followed
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

    def take_up(self, number: int, *, is_last: bool) -> Share:
        """The loop, which is followed, is given something of a share. Raises RunError where that is not its own."""
        piles = [self._undealt, *(pile for lap in self._laps for pile in (lap.held, lap.own))]
        for pile in piles:  # what a worker was given that is gone may be for others by now
            for share in pile:
                if share.number == number:
                    if is_last:
                        pile.remove(share)
                        self.move_on()
                        self._current, share.is_taken = share, True
                    return share
        raise RunError("another loop over this rank's dataset has begun, expected one at a time")

    def move_on(self, number: int | None = None) -> None:
        """The loop has moved on from this, or from whatever it was at; nothing where it is not followed."""
        if self._current is not None and number in (None, self._current.number):
            share, self._current = self._current, None
            self._moved_on(share)

    def give_back(self, number: int) -> None:
        """The loop was not given what was taken up for it: that is for the next one."""
        if self._current is not None and self._current.number == number:
            share, self._current = self._current, None
            share.is_taken = False
            self._put_back([share])

    def leave(self, worker: int) -> None:
        """A worker is gone: what it had is for others, unless the loop has ended."""
        lap = self._laps[worker]
        self._put_back([*lap.own, *(() if self.has_ended else lap.held)])
        self._laps[worker] = _Lap(held=lap.held) if self.has_ended else _Lap()

    def _put_back(self, shares: Sequence[Share]) -> None:
        self._undealt = deque(sorted([*shares, *self._undealt], key=lambda share: share.number))

    def finish(self) -> None:
        """The loop has moved on from all that it was given, where it has ended and is not followed."""
        for lap in self._laps if self.has_ended and not self._is_followed else ():
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
        self._rounds: list[_Round] = []  # that are not done with
        self._number = 0

    @property
    def is_forming(self) -> bool:
        """Whether some ranks are to get something of which others would not have as much."""
        return bool(self._forming)

    @property
    def is_done(self) -> bool:
        """Whether all ranks have moved on from all that has been taken in."""
        return not (self._forming or self._rounds)

    def add(self, items: Sequence[Arrived], left_out: Sequence[Arrived] = ()) -> None:
        """Take in what one rank is to get; it is dealt when there is as much for every other.

        left_out    what nobody gets, and is done with when this round is
        """
        self._forming.append(items)
        self._left_out += left_out
        if len(self._forming) == len(self.hands):
            forming, left_out = self._forming, self._left_out
            self._forming, self._left_out = [], []
            whole = _Round(len(forming), left_out)
            self._rounds.append(whole)
            for hand, each in zip(self.hands, forming, strict=True):
                self._number += 1
                whole.shares.append(Share(self._number, each, whole))
                hand.add(whole.shares[-1])

    def left_over(self) -> Iterator[Sequence[Arrived]]:
        """What came and does not make a whole round; it is done with."""
        forming, self._forming = self._forming, []
        self._done(self._left_out)
        for items in forming:
            self._done(items)
            yield items

    def taken(self) -> list[Arrived]:
        """What loops have been given and is not done with."""
        return list(chain.from_iterable(each.taken for each in self._rounds))

    def move_on(self) -> None:
        """Every loop that is followed has moved on from what it was at."""
        for hand in self.hands:
            hand.move_on()

    def finish(self) -> None:
        """Every loop that has ended, and is not followed, has moved on from all that it was given."""
        for hand in self.hands:
            hand.finish()

    def _moved_on(self, share: Share) -> None:
        share.is_taken = True
        share.round.left -= 1
        if not share.round.left:
            self._rounds.remove(share.round)
            self._done(share.round.items)
