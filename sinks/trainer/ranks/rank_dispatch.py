"""Dispatch of items to a trainer's processes, the ranks, in rounds, so that each rank gets as many.

A round is done with, and its rollouts may know, when all ranks have moved on from it.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from rollflow.sinks.trainer.trainer_side.rollout_peer import ArrivedItem
from rollflow.stream.data.errors import RunError


@dataclass(slots=True, eq=False)
class _Round:
    """One share for every rank.

    left        number of shares that a rank has not moved on from
    left_out    items that came between those of the shares, and that no rank gets
    """

    left: int
    left_out: Sequence[ArrivedItem]
    shares: list["RankShare"] = field(default_factory=list)

    @property
    def items(self) -> list[ArrivedItem]:
        """All items of the round."""
        return [*chain.from_iterable(share.items for share in self.shares), *self.left_out]

    @property
    def taken(self) -> list[ArrivedItem]:
        """Items of the round that loops have been given."""
        if all(share.is_taken for share in self.shares):
            return self.items
        return list(chain.from_iterable(share.items for share in self.shares if share.is_taken))


@dataclass(slots=True, eq=False)
class RankShare:
    """Items that go to one rank as one.

    number        unique, in the order of dispatch
    items         that came from rollouts
    was_sent      True if a worker has got it before
    is_taken      True if a loop is known to have been given all of it
    """

    number: int
    items: Sequence[ArrivedItem]
    round: _Round
    was_sent: bool = False
    is_taken: bool = False


@dataclass(slots=True)
class _Epoch:
    """Shares of one worker of a loop.

    own     meant for the worker
    held    given to the worker, and not done with
    done    number of shares that are done with
    """

    own: deque[RankShare] = field(default_factory=deque)
    held: deque[RankShare] = field(default_factory=deque)
    done: int = 0


class RankQueue:
    """Queue of one rank's shares, which its workers get in turn, as a `DataLoader` asks them for the items of a loop.

    A loop that is followed reports what it was given, and what it has moved on from. For other loops that is inferred
    from what their workers ask for.

    has_ended    True once a worker has got the end of the stream: its requests no longer show how far the loop is
    """

    def __init__(self, moved_on: Callable[[RankShare], None]) -> None:
        self.has_ended = self._is_followed = False
        self._current: RankShare | None = None  # that a followed loop was given last
        self._moved_on = moved_on
        self._unassigned: deque[RankShare] = deque()
        self._loop: Hashable = None
        self._epochs: list[_Epoch] = [_Epoch()]  # by worker
        self._turn = 0

    @property
    def is_empty(self) -> bool:
        """True if every share has been given to a worker."""
        return not self._unassigned and not any(epoch.own for epoch in self._epochs)

    def begin(self, loop: Hashable, workers: int, *, is_followed: bool = False) -> bool:
        """Begin a loop with so many workers, which gets what another one left; False: it has begun already.

        Raises RunError where it has begun with another number of workers.
        """
        if loop == self._loop:
            if workers != (begun := len(self._epochs)):
                raise RunError(f"workers is {workers}, expected {begun}: the loop has begun with so many")
            return False
        self.finish()
        self.move_on()
        if self._is_followed:
            self.has_ended = False  # shares that the loop has not taken are left
        self._is_followed = is_followed
        for worker in range(len(self._epochs)):
            self.leave(worker)
        self._loop, self._epochs, self._turn, self.has_ended = loop, [_Epoch() for _ in range(workers)], 0, False
        return True

    def add(self, share: RankShare) -> None:
        """Append a share."""
        self._unassigned.append(share)

    def take(self, worker: int) -> RankShare | None:
        """Give a worker its next share; None if there is none."""
        epoch = self._epochs[worker]
        while not epoch.own:
            if not self._unassigned:
                return None
            self._epochs[self._turn].own.append(self._unassigned.popleft())
            self._turn = (self._turn + 1) % len(self._epochs)
        epoch.held.append(epoch.own.popleft())
        return epoch.held[-1]

    def be_done_with(self, worker: int, count: int) -> None:
        """Note that the loop has moved on from the first `count` shares that a worker was given."""
        epoch = self._epochs[worker]
        while epoch.held and epoch.done < count and not self.has_ended:
            epoch.done += 1
            self._moved_on(epoch.held.popleft())

    def take_up(self, number: int, *, is_last: bool) -> RankShare:
        """Note that a followed loop is given an item of a share, its last one if `is_last`.

        Raises RunError where the share is not the loop's.
        """
        queues = [self._unassigned, *(queue for epoch in self._epochs for queue in (epoch.held, epoch.own))]
        for queue in queues:  # the share of a worker that is gone may be another's by now
            for share in queue:
                if share.number == number:
                    if is_last:
                        queue.remove(share)
                        self.move_on()
                        self._current, share.is_taken = share, True
                    return share
        raise RunError("another loop over this rank's dataset has begun, expected one at a time")

    def move_on(self, number: int | None = None) -> None:
        """Note that a followed loop has moved on from a share, or from the one that it was given last."""
        if self._current is not None and number in (None, self._current.number):
            share, self._current = self._current, None
            self._moved_on(share)

    def give_back(self, number: int) -> None:
        """Note that a followed loop was not given what it took up last: the next loop gets it."""
        if self._current is not None and self._current.number == number:
            share, self._current = self._current, None
            share.is_taken = False
            self._put_back([share])

    def leave(self, worker: int) -> None:
        """Note that a worker is gone: others get its shares, unless the loop has ended."""
        epoch = self._epochs[worker]
        self._put_back([*epoch.own, *(() if self.has_ended else epoch.held)])
        self._epochs[worker] = _Epoch(held=epoch.held) if self.has_ended else _Epoch()

    def _put_back(self, shares: Sequence[RankShare]) -> None:
        self._unassigned = deque(sorted([*shares, *self._unassigned], key=lambda share: share.number))

    def finish(self) -> None:
        """Move on from all shares that were given, if the loop has ended and is not followed."""
        for epoch in self._epochs if self.has_ended and not self._is_followed else ():
            while epoch.held:
                self._moved_on(epoch.held.popleft())


class RankDispatch:
    """Gives items to ranks, round by round, so that each rank gets as many.

    done      called with the items of a round, once all ranks have moved on from it

    queues    one for each rank
    """

    def __init__(self, world_size: int, done: Callable[[Sequence[ArrivedItem]], None]) -> None:
        self.queues = [RankQueue(self._moved_on) for _ in range(world_size)]
        self._done = done
        self._forming: list[Sequence[ArrivedItem]] = []
        self._left_out: list[ArrivedItem] = []
        self._rounds: list[_Round] = []  # that are not done with
        self._number = 0

    @property
    def is_forming(self) -> bool:
        """True if items for some ranks wait until there are as many for the others."""
        return bool(self._forming)

    @property
    def is_done(self) -> bool:
        """True if all ranks have moved on from all items."""
        return not (self._forming or self._rounds)

    def add(self, items: Sequence[ArrivedItem], left_out: Sequence[ArrivedItem] = ()) -> None:
        """Add items for one rank, which are dispatched when there are some for every other rank.

        left_out    items that no rank gets, done with when the round is
        """
        self._forming.append(items)
        self._left_out += left_out
        if len(self._forming) == len(self.queues):
            forming, left_out = self._forming, self._left_out
            self._forming, self._left_out = [], []
            whole = _Round(len(forming), left_out)
            self._rounds.append(whole)
            for queue, each in zip(self.queues, forming, strict=True):
                self._number += 1
                whole.shares.append(RankShare(self._number, each, whole))
                queue.add(whole.shares[-1])

    def left_over(self) -> Iterator[Sequence[ArrivedItem]]:
        """Drop and yield items that do not make a whole round; they are done with."""
        forming, self._forming = self._forming, []
        self._done(self._left_out)
        for items in forming:
            self._done(items)
            yield items

    def taken(self) -> list[ArrivedItem]:
        """Items that loops have been given and are not done with."""
        return list(chain.from_iterable(each.taken for each in self._rounds))

    def move_on(self) -> None:
        """Note that every followed loop has moved on from the share that it was given last."""
        for queue in self.queues:
            queue.move_on()

    def finish(self) -> None:
        """Move on from all shares of loops that have ended and are not followed."""
        for queue in self.queues:
            queue.finish()

    def _moved_on(self, share: RankShare) -> None:
        share.is_taken = True
        share.round.left -= 1
        if not share.round.left:
            self._rounds.remove(share.round)
            self._done(share.round.items)
