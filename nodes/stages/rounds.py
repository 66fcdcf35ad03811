"""Rounds: one fragment of every lane, taken from the ring and handed to the reader of a loop."""

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, Self, TypeVar

import anyio

from rollflow.nodes.argument_checks import check_flags
from rollflow.nodes.metrics.fragment_checks import FragmentChecks
from rollflow.nodes.metrics.hooks import Hooks
from rollflow.nodes.stages.staleness import LagBound
from rollflow.stream.data.errors import RunError
from rollflow.stream.fragments.episode_collector import EpisodeCollector
from rollflow.stream.fragments.fragment import NoFragment
from rollflow.stream.multi_agent.multi_agent_fragment import AnyFragment

F = TypeVar("F", bound=AnyFragment)
T = TypeVar("T")


class FragmentRounds(Generic[F]):
    """Takes fragments from the ring a round at a time, as many as there are lanes, and hands them out.

        lanes      that give fragments at first
        lag        leaves out what is too old: when it comes, and again when it is handed out. If it paces the rollout,
                   each round has one fragment of every lane, however much sooner one of them gives its next; else the
                   first that come
        returns    called with every fragment
        collector  makes whole episodes of them

        checks          find silent faults in fragments
        hooks           functions that are called with what comes
        handed_steps    transitions handed out
        error           that ended the ring; None: none did
        is_gathered     True if the round has all the fragments that it gets, and not all of them are handed out

    A reader that leaves its loop in the middle of a round finds the rest of it in its next loop. A round is given back
    to the ring, which may then go on, when the next one is asked for.
    """

    def __init__(
        self, lanes: Iterable[int], lag: LagBound, returns: Callable[[F], None], collector: EpisodeCollector[F]
    ) -> None:
        self.collector = collector
        self.checks, self.hooks = FragmentChecks(), Hooks(returns)
        self.handed_steps = 0
        self.is_gathered = False
        self._failure: str | None = None  # why no more rounds come
        self.error: Exception | None = None
        self.lag, self._returns = lag, returns
        # Sets are replaced, and not changed: the ring's thread does so.
        self._lanes = frozenset(lanes)  # that have come
        self._left: frozenset[int] = frozenset()  # of them
        self._absent: frozenset[int] = frozenset()  # lanes that a round need not wait for
        self._gone: dict[int, int] = {}  # lane -> fragments that it gives in all
        self._given: dict[int, int] = {}  # lane -> those that have come
        self._early: list[F] = []  # of later rounds
        self._waiting: deque[F] = deque()
        self._taken: list[int] = []  # lanes of the round's fragments, which are not given back
        self._completes: bool | None = None  # whether whole episodes are handed out; None: nothing has been

    @property
    def is_empty(self) -> bool:
        """True if all of the round has been handed out."""
        return not self._waiting

    @property
    def ready(self) -> list[Any]:
        """Fragments of the round that have not been handed out."""
        return list(self._waiting)

    @property
    def is_full(self) -> bool:
        """True if the round has all its fragments."""
        taken = frozenset(self._taken)
        if self.lag.is_pacing:
            over = {lane for lane, total in self._gone.copy().items() if self._given.get(lane, 0) >= total}
            return bool(taken) and self._lanes - over <= taken
        # After the last lane has left, others are waited for.
        return len(self._waiting) >= max(1, len(self._lanes - self._left - (self._absent - taken)))

    def lane_joined(self, lane: int) -> None:
        """Have rounds wait for a lane more. From any thread."""
        self._lanes |= {lane}

    def lane_left(self, lane: int) -> None:
        """Have rounds of a fragment less, but for rounds of every lane: see `lane_gone`. From any thread."""
        self._left |= {lane}

    def lane_absent(self, lane: int) -> None:
        """Have rounds be full without a fragment of a lane, but for a round of every lane. From any thread."""
        self._absent |= {lane}

    def lane_back(self, lane: int) -> None:
        """Have rounds wait for a fragment of a lane again. From any thread."""
        self._absent -= {lane}

    def lane_gone(self, lane: int, fragments: int) -> None:
        """Wait for no more than so many fragments of a lane. From any thread."""
        self._gone[lane] = fragments

    def give_back(self, release: Callable[[Sequence[int]], None]) -> None:
        """Let the ring go on: the reader is done with the round before."""
        taken, self._taken = self._taken, []
        if taken:
            release(taken)
        early, self._early = self._early, []
        for fragment in early:
            self._add(fragment)

    def note(self, fragment: F) -> None:
        """Count a fragment, also one that goes elsewhere."""
        self._returns(fragment)
        self.checks(fragment)

    def take(self, fragment: F | NoFragment, release: Callable[[Sequence[int]], None]) -> None:
        """Take a fragment of the ring; one that is empty, or too old, is given back at once."""
        if isinstance(fragment, NoFragment):
            return
        self.note(fragment)
        self._given[fragment.lane] = fragment.sequence + 1
        if fragment.is_empty or not self.lag.admits(fragment):
            release([fragment.lane])
        else:
            self._add(fragment)

    def _add(self, fragment: F) -> None:
        if self.lag.is_pacing and fragment.lane in self._taken:
            self._early.append(fragment)
        else:
            self._waiting.append(fragment)
            self._taken.append(fragment.lane)

    def gather(self, take: Callable[[], F | NoFragment | None], release: Callable[[Sequence[int]], None]) -> None:
        """Take the fragments of a round.

        take       gives the next fragment; None: no more come
        release    gives lanes back a fragment each, of which they may make another

        Raises what `take` raises, and RunError after it has raised.
        """
        self._begin(release)
        while not self.is_full:
            with self._noting_failure():
                fragment = take()
            if fragment is None:
                break
            self.take(fragment, release)
        self.is_gathered = True

    async def gather_async(
        self, take: Callable[[], Awaitable[F | NoFragment | None]], release: Callable[[Sequence[int]], None]
    ) -> None:
        """Take the fragments of a round, as `gather` does, in an event loop."""
        self._begin(release)
        while not self.is_full:
            with self._noting_failure():
                fragment = await take()
            if fragment is None:
                break
            self.take(fragment, release)
        self.is_gathered = True

    def _begin(self, release: Callable[[Sequence[int]], None]) -> None:
        if self._failure is not None:
            raise RunError(f"the rollout can't go on: {self._failure}; expected another one to be made")
        if self.is_empty:
            self.give_back(release)

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._failure, self.error = f"it has failed with {type(error).__name__}: {error}", error
            raise

    @property
    def incomplete_steps(self) -> int:
        """Transitions taken whose episodes have not been handed out whole."""
        return self.collector.held_steps + self.collector.headless_steps

    def check_completes(self, complete_episodes: bool) -> None:
        """Raise ValueError for what is neither True nor False, or where whole episodes can't be handed out."""
        check_flags(complete_episodes=complete_episodes)
        if complete_episodes and self.lag.max_lag is not None:
            raise ValueError(
                f"complete_episodes with max_lag={self.lag.max_lag}: an episode may span more policy versions than "
                "that, and would be left out in part; expected one of the two"
            )

    def hand_out(self, complete_episodes: bool = False) -> Iterator[Any]:
        """The fragments of the round, or one of the episodes that each of them has ended, where it has ended any.

        Raises RunError where a loop before this one was handed the others: open episodes are handed out in part.
        """
        if self._completes not in (None, complete_episodes):
            raise RunError(
                f"an earlier loop over the rollout had complete_episodes={self._completes}, expected the same in every "
                "loop: part of the open episodes has been handed out, or is held back"
            )
        self._completes = complete_episodes
        self.hooks.tell_episodes()
        if not complete_episodes:
            yield from self._hand_out()
            return
        for fragment in self._hand_out():
            self.handed_steps -= fragment.num_steps
            whole = self.collector.add(fragment)
            if whole is not None:
                self.handed_steps += whole.num_steps
                yield whole

    def let_go(self) -> None:
        """Let go of fragments that were not handed out, and of the error, once the run is over."""
        self._waiting, self._early, self.error = deque(), [], None

    def put_back(self, handed: Sequence[Any]) -> None:
        """Count fragments as not handed out, since no batch was made of them."""
        self.handed_steps -= sum(fragment.num_steps for fragment in handed)

    def _hand_out(self) -> Iterator[F]:
        """The fragments of the round, but for those that have become too old meanwhile."""
        while waiting := self._waiting:  # another one, once another thread has closed the rollout
            fragment = waiting.popleft()
            if self.lag.admits(fragment):
                self.handed_steps += fragment.num_steps
                yield fragment
        self.is_gathered = False


class RolloutIterator(Generic[T]):
    """Iterator over fragments or batches: `for` and `next()`, or `async for` and `anext()`, as the rollout was entered.

    source    has rounds ready, by `next_round` and `next_round_async`, and an `interrupt` that ends its run
    made      gives the items of a round that is ready

    A loop goes on behind a `next()`, or behind a loop that was left with `break`. It is no generator: trio warns of one
    that is left with `break`.
    """

    def __init__(self, source: Any, made: Callable[[], Iterator[T]]) -> None:
        self._source = source
        self._made = made
        self._items: Iterator[T] = iter(())  # of the round at hand
        self._is_new = True

    def __iter__(self) -> Self:
        self._is_new = True
        return self

    def __next__(self) -> T:
        try:
            while True:
                for item in self._items:
                    return item
                if not self._source.next_round(is_first=self._is_new):
                    raise StopIteration
                self._begin_round()
        except BaseException as error:
            self._end(error, is_interrupt=not isinstance(error, Exception))
            raise

    def __aiter__(self) -> Self:
        return self.__iter__()

    async def __anext__(self) -> T:
        try:
            while True:
                for item in self._items:
                    return item
                if not await self._source.next_round_async(is_first=self._is_new):
                    raise StopAsyncIteration
                self._begin_round()
        except BaseException as error:
            self._end(error, is_interrupt=not isinstance(error, (Exception, anyio.get_cancelled_exc_class())))
            raise

    def _begin_round(self) -> None:
        self._is_new, self._items = False, self._made()

    def _end(self, error: BaseException, *, is_interrupt: bool) -> None:
        self._is_new, self._items = True, iter(())
        if is_interrupt:
            self._source.interrupt(error)
