"""Credits and gates: how far a rollout may run ahead of the reader of its fragments."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rollflow.nodes.env.lane_source import LaneListener, LaneSource
from rollflow.nodes.stages.rounds import FragmentRounds
from rollflow.stream.fragments.fragment import NoFragment
from rollflow.stream.graph.node import Gate, check_gate, methods_of, wait_at
from rollflow.stream.observe.waits import Wait


class CreditedLane(Protocol):
    """A lane, here or in another process."""

    index: int

    @property
    def at_start(self) -> bool:
        """True if its next step is the first of a fragment."""
        ...

    @property
    def sequence(self) -> int:
        """Number of that fragment."""
        ...


class FragmentCredits(LaneListener):
    """A gate that lets a lane begin a fragment while fewer than `limit` are begun and not yet done with.

    It also keeps the rounds, and the stage that counts lanes, in step with lanes that come and go.

    environments    step the lanes
    rounds          of the loop over the rollout
    prefetch        rounds that it may run ahead of its reader; no more than `max_lag` under "pace"
    execution       has the stage that counts the lanes, and gives one that comes what it begins with

    limit    fragments of all lanes together, or, in rounds of every lane, of each: none takes a slower one's credits
    """

    def __init__(self, environments: LaneSource, rounds: FragmentRounds[Any], prefetch: int, execution: Any) -> None:
        self._rounds, self._execution = rounds, execution
        lanes, lag = range(environments.num_lanes), rounds.lag
        self._is_by_lane = lag.is_pacing
        self._per_lane = 1 + (min(prefetch, lag.max_lag) if lag.is_pacing and lag.max_lag is not None else prefetch)
        self.limit = self._per_lane * (1 if self._is_by_lane else len(lanes))
        is_in_rounds = self._per_lane == 1 and environments.has_fixed_lanes and not self._is_by_lane
        # Before any of them begins its second fragment.
        self._yet_to_begin = set(lanes if is_in_rounds else ())
        self._begun = 0  # with credits that are withheld from absent lanes
        self._begun_by: dict[int, int] = {}  # lane -> its last fragment: a step that was lost is begun again
        self._held: Counter[int] = Counter()  # lane -> fragments begun and not done with
        self._withheld: dict[int, int] = {}  # absent lane -> credits that it leaves to no other
        # absent lane -> its fragments whose credits are withheld once they are back
        self._in_round: dict[int, int] = {}
        self._changed: Callable[[], None] = nobody

    @property
    def wants_newest(self) -> bool:
        """True if fragments are to begin with the newest weights: those of rounds of every lane are."""
        return self._is_by_lane

    def admits(self, lane: CreditedLane) -> bool:
        """True if the lane may take its next step; the first of a fragment takes a credit."""
        if not lane.at_start:
            return True
        index, fragment = lane.index, lane.sequence
        if self._begun_by.get(index) == fragment:
            return True
        if self._is_by_lane:
            is_refused = self._held[index] >= self.limit
        else:
            is_refused = self._begun >= self.limit or index in self._withheld
        if is_refused or (self._yet_to_begin and index in self._begun_by):
            return False
        self._begun += 1
        self._held[index] += 1
        self._begun_by[index] = fragment
        self.lane_lost(index)  # no other lane waits for its first
        return True

    def leave(self, lane: int) -> None:
        """Give back the credit of the fragment that a lane began last, which never comes."""
        self.release([lane])

    def gone(self, lane: int, fragments: int) -> None:
        """Have no round of every lane wait for one that gives no more than so many fragments in all."""
        self._rounds.lane_gone(lane, fragments)

    def release(self, lanes: Sequence[int]) -> None:
        """Give back the credits of fragments, by their lanes. In the thread that the graph runs in."""
        for lane in lanes:
            self._held[lane] -= 1
            if self._in_round.get(lane):
                self._in_round[lane] -= 1
                self._withheld[lane] += 1
            else:
                self._begun -= 1
        self._changed()

    def waits_for(self) -> Wait | None:
        """What a lane that was refused waits for."""
        if self._yet_to_begin:
            lanes = ", ".join(map(str, sorted(self._yet_to_begin)))
            return Wait("credits", "waits", f"are for lanes that have not begun their first fragment: {lanes}")
        begun = self._begun - sum(list(self._withheld.values()))  # a copy: this is another thread
        taken = f"{self.limit} fragments of every lane" if self._is_by_lane else f"{begun} fragments"
        return Wait("credits", "waits", f"are taken: {taken} are begun and not given back")

    def watch(self, changed: Callable[[], None]) -> None:
        """Take the function to be called when credits come back."""
        self._changed = changed

    # As a listener

    def lane_lost(self, lane: int) -> None:
        """Have no other lane wait for the first fragment of one that is lost."""
        if lane in self._yet_to_begin:
            self._yet_to_begin.remove(lane)
            if not self._yet_to_begin:
                self._changed()

    def lane_joined(self, lane: Any, fills_a_vacancy: bool) -> None:
        """Make room for a lane; one that fills a vacancy is counted already."""
        self._execution.begin_lane(lane)
        self._execution.counting.expect(int(not fills_a_vacancy))
        self._add(self._per_lane)
        self._rounds.lane_joined(lane.index)

    def lane_left(self, lane: Any, was_the_last: bool) -> None:
        """Give up the room of a lane that goes round for the last time; after the last lane, others are waited for."""
        self._add(-self._per_lane)
        self._execution.counting.expect(int(was_the_last))
        self._rounds.lane_left(lane.index)

    def lane_absent(self, lane: Any) -> None:
        """Withhold the credits that a lane has brought, until it is back; rounds go on without it.

        Those of fragments that the reader has, or is about to get, are withheld once the reader is done with them.
        """
        begun = int(self._begun_by.get(lane.index) == lane.sequence)
        self._in_round[lane.index] = in_round = min(self._held[lane.index] - begun, self._per_lane)
        self._withheld[lane.index] = withheld = self._per_lane - in_round - begun
        self._begun += withheld
        self._changed()
        self._rounds.lane_absent(lane.index)

    def lane_back(self, lane: Any) -> None:
        """Give a lane that was absent its credits again; rounds wait for it."""
        self._rounds.lane_back(lane.index)
        del self._in_round[lane.index]
        self._begun -= self._withheld.pop(lane.index)
        self._changed()

    def _add(self, fragments: int) -> None:
        if not self._is_by_lane:
            self.limit += fragments
            self._changed()


class PacingGate(Protocol):
    """What a gate of lanes may have beside: it takes note of fragments and lanes that never come."""

    @property
    def wants_newest(self) -> bool:
        """True if fragments are to begin with the newest weights."""
        return False

    def leave(self, lane: int, /) -> None:
        """Take note that the fragment which a lane began last never comes."""

    def gone(self, lane: int, fragments: int, /) -> None:
        """Take note that a lane gives no more than so many fragments in all."""


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
        self._pacing = [methods_of("a gate of the rollout", gate, PacingGate) for gate in gates]
        only = gates[0] if len(gates) == 1 else None
        self._credits = only if isinstance(only, FragmentCredits) else None  # which slow no step down

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

    def admits(self, lane: CreditedLane) -> bool:
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
    def wants_newest(self) -> bool:
        """True if one of the gates wants fragments to begin with the newest weights."""
        return any(getattr(gate, "wants_newest", False) for gate in self._gates)

    def fragment_missing(self, lane: int) -> None:
        """Report that the fragment which a lane began last never comes."""
        self._tell("leave", lane)

    def lane_set_aside(self, lane: int, fragments: int, last: Any = None) -> Any:
        """Report that a lane was set aside after so many fragments: it is gone, unless the whole run comes to its end.

        With it go all that were begun. Returns its last fragment; where it has none, `NoFragment` for a reader who may
        wait for it in a round of every lane, else None.
        """
        if not self._environments.is_draining:
            self._tell("gone", lane, fragments)
        return NoFragment(lane) if last is None and self._has_rounds_of_every_lane else last

    def lane_absent(self, absent: NoFragment) -> NoFragment | None:
        """The word that a lane is absent, for a reader that may wait for it; None in a graph, where none does."""
        return None if self._credits is None else absent

    def lane_finished(self, lane: int, fragments: int) -> None:
        """Report that a lane has given all its fragments: it is gone where others go on.

        Others do that where they have come later, and in rounds of every lane, in which empty fragments have no place.
        """
        if self._has_rounds_of_every_lane or not self._environments.has_fixed_lanes:
            self.lane_set_aside(lane, fragments)

    @property
    def _has_rounds_of_every_lane(self) -> bool:
        return self._credits is not None and self._credits.wants_newest

    def _tell(self, method: str, *args: int) -> None:
        """Call a method of `PacingGate` of the gates that have it."""
        for methods in self._pacing:
            if method in methods:
                methods[method](*args)


def nobody() -> None:
    """Do nothing: nobody watches."""
