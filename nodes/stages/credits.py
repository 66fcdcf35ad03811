"""Credits and gates: how far a rollout may run ahead of the reader of its fragments."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from rollflow.nodes.env.lane_source import LaneListener, LaneSource
from rollflow.nodes.stages.rounds import FragmentRounds
from rollflow.nodes.stages.staleness import LagBound
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


class FragmentCredits:
    """A gate that lets a lane begin a fragment while fewer than `limit` are begun and not yet done with.

    limit     fragments of all lanes together; with `rounds` those of each lane: none takes the credits of a slower one
    first     lanes that are to begin their first fragment, or be lost, before any of them begins its second
    rounds    of one fragment of every lane, which are told how many fragments a lane that is gone has given in all;
              None: rounds have the fragments that come first
    """

    def __init__(self, limit: int, *, first: Iterable[int] = (), rounds: FragmentRounds[Any] | None = None) -> None:
        self.limit, self._rounds = limit, rounds
        self._yet_to_begin = set(first)
        self._begun = 0  # with credits that are withheld from absent lanes
        self._begun_by: dict[int, int] = {}  # lane -> its last fragment: a step that was lost is begun again
        self._held: Counter[int] = Counter()  # lane -> fragments begun and not done with
        self._withheld: dict[int, int] = {}  # absent lane -> credits that it leaves to no other
        self._in_round: dict[
            int, int
        ] = {}  # absent lane -> its fragments whose credits are withheld once they are back
        self._changed: Callable[[], None] = nobody

    @property
    def wants_newest(self) -> bool:
        """True if fragments are to begin with the newest weights: those of rounds of every lane are."""
        return self._rounds is not None

    def admits(self, lane: CreditedLane) -> bool:
        """True if the lane may take its next step; the first of a fragment takes a credit."""
        if not lane.at_start:
            return True
        index, fragment = lane.index, lane.sequence
        if self._begun_by.get(index) == fragment:
            return True
        if self._rounds is not None:
            is_refused = self._held[index] >= self.limit
        else:
            is_refused = self._begun >= self.limit or index in self._withheld
        if is_refused or (self._yet_to_begin and index in self._begun_by):
            return False
        self._begun += 1
        self._held[index] += 1
        self._begun_by[index] = fragment
        self.wait_no_more(index)
        return True

    def wait_no_more(self, lane: int) -> None:
        """Take note that a lane has begun its first fragment, or was lost before."""
        if lane in self._yet_to_begin:
            self._yet_to_begin.remove(lane)
            if not self._yet_to_begin:
                self._changed()

    def leave(self, lane: int) -> None:
        """Give back the credit of the fragment that a lane began last, which never comes."""
        self.release([lane])

    def gone(self, lane: int, fragments: int) -> None:
        """Have no round of every lane wait for one that gives no more than so many fragments in all."""
        if self._rounds is not None:
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

    def lane_absent(self, lane: CreditedLane, fragments: int) -> None:
        """Withhold the credits that a lane has brought, until it is back, and have it begin no fragment.

        Those of fragments that the reader has, or is about to get, are withheld once the reader is done with them.
        """
        begun = int(self._begun_by.get(lane.index) == lane.sequence)
        self._in_round[lane.index] = in_round = min(self._held[lane.index] - begun, fragments)
        self._withheld[lane.index] = withheld = fragments - in_round - begun
        self._begun += withheld
        self._changed()

    def lane_back(self, lane: CreditedLane) -> None:
        """Give a lane that was absent its credits again."""
        del self._in_round[lane.index]
        self._begun -= self._withheld.pop(lane.index)
        self._changed()

    def add(self, fragments: int) -> None:
        """Raise the limit of all lanes together, or lower it. In the thread that the graph runs in."""
        if self._rounds is None:
            self.limit += fragments
            self._changed()

    def waits_for(self) -> Wait | None:
        """What a lane that was refused waits for."""
        if self._yet_to_begin:
            lanes = ", ".join(map(str, sorted(self._yet_to_begin)))
            return Wait("credits", "waits", f"are for lanes that have not begun their first fragment: {lanes}")
        begun = self._begun - sum(list(self._withheld.values()))  # a copy: this is another thread
        taken = f"{begun} fragments" if self._rounds is None else f"{self.limit} fragments of every lane"
        return Wait("credits", "waits", f"are taken: {taken} are begun and not given back")

    def watch(self, changed: Callable[[], None]) -> None:
        """Take the function to be called when credits come back."""
        self._changed = changed


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


class LaneCounts(LaneListener):
    """Listener to environments: keeps stages, rounds and credits in step with the lanes that come and go.

    credits               of the loop over the rollout
    rounds                have a fragment of every lane
    fragments_per_lane    credits that each lane brings
    execution             has the stage that counts the lanes, and gives one that comes what it begins with
    """

    def __init__(
        self, credits: FragmentCredits, rounds: FragmentRounds[Any], fragments_per_lane: int, execution: Any
    ) -> None:
        self._credits, self._rounds, self._fragments_per_lane = credits, rounds, fragments_per_lane
        self._execution = execution

    def lane_lost(self, lane: int) -> None:
        """Have no other lane wait for the first fragment of one that is lost."""
        self._credits.wait_no_more(lane)

    def lane_joined(self, lane: Any, fills_a_vacancy: bool) -> None:
        """Make room for a lane; one that fills a vacancy is counted already."""
        self._execution.begin_lane(lane)
        self._execution.counting.expect(int(not fills_a_vacancy))
        self._credits.add(self._fragments_per_lane)
        self._rounds.lane_joined(lane.index, fills_a_vacancy)

    def lane_left(self, lane: Any, was_the_last: bool) -> None:
        """Give up the room of a lane that goes round for the last time; after the last lane, others are waited for."""
        self._credits.add(-self._fragments_per_lane)
        self._execution.counting.expect(int(was_the_last))
        self._rounds.lane_left(was_the_last)

    def lane_absent(self, lane: Any) -> None:
        """Have rounds go on without a lane whose host is away."""
        self._credits.lane_absent(lane, self._fragments_per_lane)
        self._rounds.lane_absent(lane.index)

    def lane_back(self, lane: Any) -> None:
        """Have rounds wait for a lane again."""
        self._rounds.lane_back(lane.index)
        self._credits.lane_back(lane)


def credits_of(
    environments: LaneSource, lag: LagBound, rounds: FragmentRounds[Any], prefetch: int, execution: Any
) -> tuple[FragmentCredits, LaneCounts]:
    """Credits for a loop over a rollout, and what keeps them and the rounds in step with lanes that come and go.

    prefetch    rounds that it may run ahead of its reader; no more than `max_lag` under "pace"
    """
    lanes = range(environments.num_lanes)
    if lag.max_lag is not None and lag.on_excess == "pace":
        per_lane = 1 + min(prefetch, lag.max_lag)
        rounds.every_lane = set(lanes)
        credits = FragmentCredits(per_lane, rounds=rounds)
    else:
        per_lane = 1 + prefetch
        is_in_rounds = per_lane == 1 and environments.has_fixed_lanes
        credits = FragmentCredits(len(lanes) * per_lane, first=lanes if is_in_rounds else ())
    return credits, LaneCounts(credits, rounds, per_lane, execution)


def nobody() -> None:
    """Do nothing: nobody watches."""
