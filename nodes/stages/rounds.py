"""Rounds of a loop: how old fragments may be, how far the ring runs ahead of the reader, and what is handed out."""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, Literal, Self, TypeVar

import anyio

from rollflow.nodes.argument_checks import check_flags
from rollflow.nodes.env.lane_source import LaneGate, LaneSource, nobody
from rollflow.nodes.metrics.episode_returns import Hooks
from rollflow.nodes.metrics.fragment_checks import FragmentChecks
from rollflow.stream.data.errors import LagError, RunError
from rollflow.stream.fragments.fragment import NoFragment
from rollflow.stream.graph.node import Gate, check_gate, methods_of, wait_at
from rollflow.stream.multi_agent.multi_agent_fragment import AnyFragment
from rollflow.stream.multi_agent.whole_episodes import EpisodeCollector
from rollflow.stream.observe.waits import Sign, Wait

OnExcess = Literal["drop", "pace"]
_MOST_DROPPED = 0.9  # share of the transitions that are left out as too old
_FRAGMENTS = 10  # that a share is told from
_TURNS = ", and allow by max_lag for steps that wait for their agent's next turn while fragments are cut"


class LagBound:
    """Refuses fragments that are more than `max_lag` policy versions old.

    versions     gives module -> policy version published last; "" stands for the only module
    max_lag      versions; None: any age will do
    on_excess    "drop": an older fragment is left out and counted
                 "pace": the rollout is held back so that none gets older, as long as the weights are published
                 once per batch; one that is older nonetheless raises LagError
    trained      ids of the modules whose age counts; None: all

    Of several modules the oldest counts, each beside the newest of its own. A step that waits for its agent's next
    observation while a fragment is cut is as old as its action: if agents take turns, nobody can help that.

    is_pacing                           True if the rollout is held back so that no fragment gets too old
    dropped_fragments, dropped_steps    what was left out so far
    is_asked                            True to have the age of the next fragment looked at, also without a bound
    last                                age of the fragment that was admitted last, and looked at; None: none was
    """

    def __init__(
        self,
        versions: Callable[[], Mapping[Any, int]],
        max_lag: int | None,
        on_excess: OnExcess = "drop",
        *,
        trained: Collection[Any] | None = None,
    ) -> None:
        check_staleness(max_lag, on_excess)
        self.versions, self.max_lag = versions, max_lag
        self._trained = None if trained is None else frozenset(trained)  # the list is the caller's
        self.is_pacing = on_excess == "pace"
        self.dropped_fragments = 0
        self.dropped_steps = 0
        self.is_asked = False
        self.last: int | None = None

    def lag(self, fragment: Any) -> int:
        """Versions published since the oldest that an action of the fragment was computed with."""
        newest = self.versions()
        lags: list[int] = [
            newest[module_id] - version
            for module_id, version in fragment.policy_versions().items()
            if module_id in newest and (self._trained is None or module_id in self._trained)
        ]
        return max((*lags, 0))  # another place may know of a version a moment sooner

    def look_at(self, fragment: Any) -> None:
        """Look at the age of a fragment, if that is asked for: it takes a pass over a column."""
        if self.is_asked:
            self.is_asked, self.last = False, self.lag(fragment)

    def admits(self, fragment: Any) -> bool:
        """True if the fragment is fresh enough for a learner; others are counted. Raises LagError under "pace"."""
        if self.max_lag is None:
            self.look_at(fragment)
            return True
        lag = self.lag(fragment)
        if lag <= self.max_lag:
            self.last = lag
            return True
        if self.is_pacing:
            turns = "" if "" in self.versions() else _TURNS
            raise LagError(
                f"{fragment!r} is {lag} policy versions old, expected at most max_lag={self.max_lag}: under "
                f"on_excess='pace' publish once per batch{turns}, or use on_excess='drop'"
            ).see("lag")
        self.dropped_fragments += 1
        self.dropped_steps += fragment.num_steps
        return False

    def signs(self, handed_steps: int) -> Sequence[Sign]:
        """A silent fault: nearly all fragments are left out because they are too old.

        handed_steps    transitions that were not left out
        """
        made = self.dropped_steps + handed_steps
        if self.dropped_fragments < _FRAGMENTS or self.dropped_steps < _MOST_DROPPED * made:
            return ()
        text = (
            f"{self.dropped_steps / made:.0%} of {made:,} transitions were left out as too old: max_lag={self.max_lag} "
            "with this prefetch and this rate of publishing leaves hardly any; raise max_lag, or on_excess='pace'"
        )
        return (Sign("lag", text),)


def check_staleness(max_lag: int | None, on_excess: str) -> None:
    """Raise ValueError for an `on_excess` that a rollout does not know, or that has no `max_lag` to act on."""
    if on_excess not in ("drop", "pace"):
        raise ValueError(f"on_excess is {on_excess!r}, expected 'drop' or 'pace'")
    check_bounded(on_excess, max_lag)


def check_bounded(on_excess: str, max_lag: int | None) -> None:
    """Raise ValueError for an `on_excess` other than "drop" without a `max_lag`, the bound that it acts on."""
    if on_excess != "drop" and max_lag is None:
        raise ValueError(f"on_excess={on_excess!r} is for fragments older than max_lag, expected max_lag=0 or more")


F = TypeVar("F", bound=AnyFragment)
T = TypeVar("T")


class FragmentRounds(Generic[F]):
    """Takes fragments from the ring a round at a time, as many as there are lanes, and hands them out.

        credits    know the lanes that rounds are made of
        lag        leaves out what is too old: when it comes, and again when it is handed out. If it paces the rollout,
                   each round has one fragment of every lane, however much sooner one of them gives its next; else the
                   first that come
        returns    called with every fragment

        collector       makes whole episodes of them
        checks          find silent faults in fragments
        hooks           functions that are called with what comes
        handed_steps    transitions handed out
        error           that ended the ring; None: none did
        schedule        is shown every fragment that is taken, and the error; None: nothing is recorded

    A reader that leaves its loop in the middle of a round finds the rest of it in its next loop. A round is given back
    to the ring, which may then go on, when the next one is asked for.
    """

    def __init__(
        self, credits: "FragmentCredits", lag: LagBound, returns: Callable[[F], None], *, by_lane: bool = False
    ) -> None:
        self._by_lane = by_lane or lag.is_pacing
        self.collector = EpisodeCollector()
        self.checks, self.hooks = FragmentChecks(), Hooks(returns)
        self.handed_steps = 0
        self.error: Exception | None = None
        self.schedule: Any = None
        self.lag, self._returns, self._credits = lag, returns, credits
        self._given: dict[int, int] = {}  # lane -> fragments that have come
        self._come: list[F] = []  # that are in no round yet
        self._round: deque[F] = deque()  # fragments of it that have not been handed out
        self._taken: list[int] = []  # lanes of the round's fragments, which are not given back
        self._has_ended = False  # no more come
        self._completes: bool | None = None  # whether whole episodes are handed out; None: nothing has been

    @property
    def ready(self) -> list[Any]:
        """Fragments of the round that have not been handed out."""
        return list(self._round)

    @property
    def is_full(self) -> bool:
        """True if all fragments of the next round have come."""
        credits, taken = self._credits, frozenset(fragment.lane for fragment in self._come)
        if self._by_lane:
            over = {lane for lane, total in credits.totals.copy().items() if self._given.get(lane, 0) >= total}
            return bool(taken) and credits.lanes - over <= taken
        # After the last lane has left, others are waited for.
        return len(self._come) >= max(1, len(credits.lanes - (credits.absent.keys() - taken)))

    def give_back(self, release: Callable[[Sequence[int]], None]) -> None:
        """Let the ring go on: the reader is done with the round before."""
        taken, self._taken = self._taken, []
        if taken:
            release(taken)

    def note(self, fragment: F) -> None:
        """Count a fragment, also one that goes elsewhere."""
        self._returns(fragment)
        self.checks(fragment)

    def take(self, fragment: F | NoFragment | None, release: Callable[[Sequence[int]], None]) -> None:
        """Take a fragment of the ring, None if no more come; one that is empty, or too old, is given back at once."""
        self._has_ended = fragment is None
        if fragment is None or isinstance(fragment, NoFragment):
            return
        self.note(fragment)
        if self.schedule is not None:
            self.schedule.see(fragment)
        self._given[fragment.lane] = fragment.sequence + 1
        if fragment.is_empty or not self.lag.admits(fragment):
            release([fragment.lane])
        else:
            self._come.append(fragment)

    def missing(self, release: Callable[[Sequence[int]], None]) -> Iterator[None]:
        """Ask for the fragments of a round, one at each step of the iterator; none while some are to be handed out.

        release    gives lanes back a fragment each, of which they may make another

        Raises RunError once a fragment could not be had.
        """
        if self._round:
            return
        if self.error is not None:
            failure = f"{type(self.error).__name__}: {self.error}"
            raise RunError(f"the rollout can't go on: it has failed with {failure}; expected another one to be made")
        self.give_back(release)
        self._has_ended = False
        while not (self.is_full or self._has_ended):
            yield
        come, later = one_of_each(self._come, lambda fragment: fragment.lane) if self._by_lane else (self._come, [])
        self._come, self._round, self._taken = later, deque(come), [fragment.lane for fragment in come]

    @contextmanager
    def noting_failure(self) -> Iterator[None]:
        """Keep an error that the block raises: no more fragments come."""
        try:
            yield
        except Exception as error:
            self.error = error if self.schedule is None else self.schedule.explained(error)
            if self.error is error:
                raise
            raise self.error from error

    @property
    def incomplete_steps(self) -> int:
        """Transitions taken whose episodes have not been handed out whole."""
        return self.collector.held_steps + self.collector.headless_steps

    def check_completes(self, complete_episodes: bool) -> None:
        """Raise ValueError for what is neither True nor False, or if whole episodes can't be handed out."""
        check_flags(complete_episodes=complete_episodes)
        if complete_episodes and self.lag.max_lag is not None:
            raise ValueError(
                f"complete_episodes with max_lag={self.lag.max_lag}: an episode may span more policy versions than "
                "that, and would be left out in part; expected one of the two"
            )

    def hand_out(self, complete_episodes: bool = False) -> Iterator[Any]:
        """The fragments of the round, or one of the episodes that each of them has ended, if it has ended any.

        Raises RunError if a loop before this one was handed the others: open episodes are handed out in part.
        """
        if self._completes not in (None, complete_episodes):
            raise RunError(
                f"an earlier loop over the rollout had complete_episodes={self._completes}, expected the same in every "
                "loop: part of the open episodes has been handed out, or is held back"
            )
        self._completes = complete_episodes
        self.hooks.tell_episodes()
        while waiting := self._round:  # another one, once another thread has closed the rollout
            fragment = waiting.popleft()
            if not self.lag.admits(fragment):  # it has become too old meanwhile
                continue
            item = self.collector.add(fragment.host) if complete_episodes else fragment
            if item is not None:
                self.handed_steps += item.num_steps
                yield item

    def get_state(self, plain: Callable[[F], Any]) -> dict[str, Any]:
        """What has been counted, and the fragments that have come and were not handed out, in plain form."""
        fragments = {"come": [*map(plain, self._come)], "round": [*map(plain, self._round)]}
        counts = {"given": list(self._given.items()), "taken": list(self._taken), "handed_steps": self.handed_steps}
        dropped = [self.lag.dropped_fragments, self.lag.dropped_steps]
        return {**fragments, **counts, "dropped": dropped, "completes": self._completes}

    def set_state(self, state: Mapping[str, Any], made: Callable[[Any], F]) -> None:
        """Go on from what `get_state` gave; `made` makes a fragment of its plain form."""
        self._come, self._round = [*map(made, state["come"])], deque(map(made, state["round"]))
        self._given, self._taken = dict(state["given"]), list(state["taken"])
        self.handed_steps, self._completes = state["handed_steps"], state["completes"]
        self.lag.dropped_fragments, self.lag.dropped_steps = state["dropped"]

    def let_go(self) -> None:
        """Let go of fragments that were not handed out, and of the error, once the run is over."""
        self._come, self._round, self.error = [], deque(), None

    def put_back(self, handed: Sequence[Any]) -> None:
        """Count fragments as not handed out, since no batch was made of them."""
        self.handed_steps -= sum(fragment.num_steps for fragment in handed)


def one_of_each(items: Iterable[T], key: Callable[[T], Any]) -> tuple[list[T], list[T]]:
    """The first item of each key, such as a lane, in the order in which they came, and the items behind them."""
    first: dict[Any, T] = {}
    later = [item for item in items if first.setdefault(key(item), item) is not item]
    return list(first.values()), later


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


class FragmentCredits(LaneGate):
    """A gate that lets a lane begin a fragment while fewer than `limit` are begun and not yet done with.

    It also knows the lanes that rounds are made of, and keeps the stage that counts lanes in step with them.

    environments    step the lanes
    lag             of the rounds of the loop over the rollout
    prefetch        rounds that it may run ahead of its reader; no more than `max_lag` under "pace"
    counting        stage that counts the lanes
    begin_lane      gives a lane that comes what its actions are sampled with; None: that is elsewhere

    lanes     that rounds are made of; under "pace" also those that have left, see `totals`. It is replaced, and never
              changed, as `absent` is: the reader's thread looks at them
    absent    lane that a round need not wait for, but for a round of every lane -> 1 if it has begun a fragment
    totals    lane that gives no more -> fragments that it gives in all
    lets_run_ahead    whether a fragment may have steps that were begun in the one before
    """

    def __init__(
        self,
        environments: LaneSource,
        lag: LagBound,
        prefetch: int,
        counting: Any,
        begin_lane: Callable[[Any], None] | None,
        *,
        by_lane: bool = False,
    ) -> None:
        super().__init__()
        self._counting, self._begin_lane = counting, begin_lane
        self.lanes = frozenset(range(environments.num_lanes))
        self.absent: Mapping[int, int] = {}
        self.totals: dict[int, int] = {}
        self._is_by_lane = by_lane or lag.is_pacing
        self._per_lane = 1 + (min(prefetch, lag.max_lag) if lag.is_pacing and lag.max_lag is not None else prefetch)
        self.lets_run_ahead = self._per_lane > 1 and not self._is_by_lane
        is_in_rounds = self._per_lane == 1 and environments.has_fixed_lanes and not self._is_by_lane
        # Before any of them begins its second fragment.
        self._yet_to_begin = set(self.lanes if is_in_rounds else ())
        self._held: Counter[int] = Counter()  # lane -> fragments begun and not done with
        self._begun = 0  # of all lanes

    @property
    def limit(self) -> int:
        """Fragments of all lanes together, or, in rounds of every lane, of each: none takes a slower one's credits."""
        return self._per_lane * (1 if self._is_by_lane else len(self.lanes))

    @property
    def _withheld(self) -> int:
        """Credits that absent lanes leave to no other: each has its share, beside the fragment that it has begun."""
        return sum(max(self._per_lane - self._held[lane], -begun) for lane, begun in self.absent.items())

    @property
    def wants_newest(self) -> bool:
        """True if fragments are to begin with the newest weights: those of rounds of every lane are."""
        return self._is_by_lane

    def get_state(self) -> dict[str, Any]:
        """The fragments of lanes that are begun, and not done with."""
        return {"begun_by": list(self._begun_by.items()), "held": list(self._held.items())}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Count as another gate did that gave this state."""
        self._begun_by, self._held = dict(state["begun_by"]), Counter(dict(state["held"]))
        self._begun = self._held.total()
        self._yet_to_begin -= self._begun_by.keys()

    def _lets_begin(self, lane: Any) -> bool:
        index = lane.index
        if self._is_by_lane:
            is_refused = self._held[index] >= self.limit
        else:
            is_refused = self._begun + self._withheld >= self.limit or index in self.absent
        if is_refused or (self._yet_to_begin and index in self._begun_by):
            return False
        self._begun += 1
        self._held[index] += 1
        self.lane_lost(index)  # no other lane waits for its first
        return True

    def leave(self, lane: int) -> None:
        """Give back the credit of the fragment that a lane began last, which never comes."""
        self.release([lane])

    def gone(self, lane: int, fragments: int) -> None:
        """Have no round of every lane wait for one that gives no more than so many fragments in all."""
        self.totals[lane] = fragments

    def release(self, lanes: Sequence[int]) -> None:
        """Give back the credits of fragments, by their lanes. In the thread that the graph runs in."""
        for lane in lanes:
            self._held[lane] -= 1
            self._begun -= 1
        self._changed()

    def releasing(self, lanes: Sequence[int]) -> Callable[[], None]:
        """What gives back the credits of fragments that the reader is done with now: to be called later."""
        return partial(self.release, lanes)

    def waits_for(self) -> Wait | None:
        """What a lane that was refused waits for."""
        if self._yet_to_begin:
            lanes = ", ".join(map(str, sorted(self._yet_to_begin)))
            return Wait("credits", "waits", f"are for lanes that have not begun their first fragment: {lanes}")
        taken = f"{self.limit} fragments of every lane" if self._is_by_lane else f"{self._begun} fragments"
        return Wait("credits", "waits", f"are taken: {taken} are begun and not given back")

    # As a listener

    def lane_lost(self, lane: int) -> None:
        """Have no other lane wait for the first fragment of one that is lost."""
        if lane in self._yet_to_begin:
            self._yet_to_begin.remove(lane)
            if not self._yet_to_begin:
                self._changed()

    def lane_joined(self, lane: Any, fills_a_vacancy: bool) -> None:
        """Make room for a lane; one that fills a vacancy is counted already."""
        if self._begin_lane is not None:
            self._begin_lane(lane)
        self._counting.expect(int(not fills_a_vacancy))
        self.lanes |= {lane.index}
        self._changed()

    def lane_left(self, lane: Any, was_the_last: bool) -> None:
        """Give up the room of a lane that goes round for the last time; after the last lane, others are waited for.

        Rounds have a fragment less, but for rounds of every lane: see `gone`.
        """
        if not self._is_by_lane:
            self.lanes -= {lane.index}
        self._counting.expect(int(was_the_last))
        self._changed()

    def lane_absent(self, lane: Any) -> None:
        """Withhold the credits of a lane, until it is back; rounds go on without it.

        Those of fragments that the reader has, or is about to get, are withheld once the reader is done with them.
        """
        self.absent = {**self.absent, lane.index: int(self._begun_by.get(lane.index) == lane.sequence)}
        self._changed()

    def lane_back(self, lane: Any) -> None:
        """Give a lane that was absent its credits again; rounds wait for it."""
        self.absent = {index: begun for index, begun in self.absent.items() if index != lane.index}
        self._changed()


class OrderedCredits(FragmentCredits):
    """Credits that have lanes go on in the order of their numbers, each fragment with the weights of a certain round.

    A lane begins its fragment number s with the weights that had been published when the reader was done with round
    s - 1 - prefetch, however far it is by then.

    of_credits    arguments of `FragmentCredits`
    acting        has the weights, which wait for this
    """

    def __init__(self, *of_credits: Any, acting: Any) -> None:
        super().__init__(*of_credits, by_lane=True)
        self._acting = acting
        for _, weights in acting.by_id.values():
            weights.keep_all()
        self._order = deque(sorted(self.lanes))  # the first one goes on next
        # lane -> module -> version published last, when the reader was done with each of its fragments
        self._versions: dict[int, deque[Mapping[Any, int]]] = {lane: deque() for lane in self.lanes}
        self._is_under_way = False  # the first lane: it was admitted, and does not have its actions yet

    def admits(self, lane: Any) -> bool:
        if self._order[0] == lane.index and not self._is_under_way:
            self._is_under_way = super().admits(lane)
            return self._is_under_way
        return False

    def lane_acts(self, lane: Any) -> None:
        """Let the next lane go on: this one has its actions."""
        self._is_under_way = False
        self._order.rotate(-1)
        self._changed()

    def _lets_begin(self, lane: Any) -> bool:
        if not super()._lets_begin(lane):
            return False
        done = lane.sequence + 1 - self._held[lane.index]
        newest: Mapping[Any, int] = {}  # of the rounds that count: after a resume with another `prefetch` not one
        while done - len(self._versions[lane.index]) <= lane.sequence - self._per_lane:
            newest = self._versions[lane.index].popleft()
        for module, version in newest.items():
            self._acting.by_id[module][1].let_in(version)
        return True

    def releasing(self, lanes: Sequence[int]) -> Callable[[], None]:
        versions = {module: weights.mark_newest() for module, (_, weights) in self._acting.by_id.items()}

        def release() -> None:
            for lane in lanes:
                self._versions[lane].append(versions)
            self.release(lanes)

        return release

    def gone(self, lane: int, fragments: int) -> None:
        super().gone(lane, fragments)
        if lane in self._order:
            self._order.remove(lane)
        self._changed()

    def get_state(self) -> dict[str, Any]:
        versions = [[lane, [list(of.items()) for of in each]] for lane, each in self._versions.items()]
        return {**super().get_state(), "order": list(self._order), "versions": versions}

    def set_state(self, state: Mapping[str, Any]) -> None:
        super().set_state(state)
        self._order = deque(state["order"])
        self._versions = {lane: deque(map(dict, each)) for lane, each in state["versions"]}


class LaneGates:
    """The gates of a ring: a lane goes on where all of them let it, and they hear of what never comes.

    Stages are made before their ring has its gates, and a ring that is drawn anew has others: they report here.

    environments    the node that steps the lanes
    """

    def __init__(self, environments: LaneSource) -> None:
        self._environments = environments
        self._gates: Sequence[Gate] = ()
        self.take(())

    def take(self, gates: Sequence[Gate]) -> None:
        """Take the gates of the ring that is drawn now: the credits of a loop alone, or those of a graph."""
        for gate in gates:
            check_gate("a gate of the rollout", gate)
        self.watch(nobody)  # those before may outlive their ring
        self._gates = tuple(gates)
        self._refused: Gate | None = None  # the last time
        found = [methods_of("a gate of the rollout", gate, LaneGate) for gate in gates]
        self._leave = [methods["leave"] for methods in found if "leave" in methods]
        self._gone = [methods["gone"] for methods in found if "gone" in methods]
        # Of a loop, which has no other gate: they slow no step down.
        self._credits = next((gate for gate in gates if isinstance(gate, FragmentCredits)), None)

    @property
    def gate(self) -> Gate | None:
        """What stands in the ring for all of them; None: there is none."""
        return self._credits or (self if self._gates else None)

    # As a gate

    @property
    def holder(self) -> str | None:
        """Name of what the gate waits for that refused last."""
        return getattr(self._refused, "holder", None)

    def waits_for(self) -> Wait | None:
        """What the gate waits for that refused last."""
        return wait_at(self._refused)

    @property
    def is_ready(self) -> bool:
        """True once all of them are ready."""
        self._refused = next((gate for gate in self._gates if not getattr(gate, "is_ready", True)), None)
        return self._refused is None

    def admits(self, lane: Any) -> bool:
        """True if the lane may take its next step."""
        for gate in self._gates:
            if not gate.admits(lane):
                self._refused = gate
                return False
        return True

    def watch(self, changed: Callable[[], None]) -> None:
        """Take the function to be called when one of them has changed."""
        for gate in self._gates:
            gate.watch(changed)

    # What stages report

    @property
    def lets_run_ahead(self) -> bool:
        """True if fragments may have steps that were begun in the one before: in a graph all may."""
        return self._credits is None or self._credits.lets_run_ahead

    @property
    def wants_newest(self) -> bool:
        """True if one of the gates wants fragments to begin with the newest weights."""
        return any(getattr(gate, "wants_newest", False) for gate in self._gates)

    def fragment_missing(self, lane: int) -> None:
        """Report that the fragment which a lane began last never comes."""
        for leave in self._leave:
            leave(lane)

    def lane_set_aside(self, lane: int, fragments: int, last: Any = None) -> Any:
        """Report that a lane was set aside after so many fragments: it is gone, unless the whole run comes to its end.

        With it go all that were begun. Returns its last fragment; if it has none, `NoFragment` for a reader who may
        wait for it in a round of every lane, else None.
        """
        for gone in () if self._environments.is_draining else self._gone:
            gone(lane, fragments)
        return NoFragment(lane) if last is None and self._has_rounds_of_every_lane else last

    def lane_absent(self, absent: NoFragment) -> NoFragment | None:
        """The word that a lane is absent, for a reader that may wait for it; None in a graph, if none does."""
        return None if self._credits is None else absent

    def lane_finished(self, lane: int, fragments: int) -> None:
        """Report that a lane has given all its fragments: it is gone if others go on.

        Others do that if they have come later, and in rounds of every lane, in which empty fragments have no place.
        """
        if self._has_rounds_of_every_lane or not self._environments.has_fixed_lanes:
            self.lane_set_aside(lane, fragments)

    @property
    def _has_rounds_of_every_lane(self) -> bool:
        return self._credits is not None and self._credits.wants_newest
