"""Stall watch: the rules for when a wait is a stall, and what follows a run by looks and says so."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from time import monotonic
from typing import Any, Literal

from rollflow.stream.observe.stacks import is_debugged_now
from rollflow.stream.observe.waits import Diagnosis, Look, Probe, Sign, Wait, Way, diagnosed, is_closed, way_from

OnStall = Literal["log", "raise"]
AGAIN_S = (60.0, 300.0, 1800.0)  # of standing still, when a message is repeated; then every last of these
_LOOK_S = 0.5
_LATE_S = 1.0  # that a look may come late before all waits begin anew
_CALLS = 10  # that a call's own times count from
_TIMES = 10.0  # a stall takes so many times what all but one in a hundred calls take
_FIRST_S = 30.0  # that a first call has: a reset, a step or a pass may have to load or to build something
_COMPILE_S = 300.0  # that each of the first calls has that may compile
_SINK_S = 30.0
_KEPT = 256  # long calls of a party
_NO_STALL = ("works", "holds back")
_DEBUGGER_LOOKS = 4  # for a debugger, within `after`


@dataclass(frozen=True, slots=True)
class StallRules:
    """When and how the doctor speaks.

        after       seconds for which nothing leaves the graph; None: the doctor is off
        on_stall    "log", or "raise": the run ends with a StallError
        clock       gives seconds since some moment; the default stands still while the machine is suspended

    Raises ValueError for a number of seconds that is not above 0, and another word.
    """

    after: float | None = 5.0
    on_stall: OnStall = "log"
    clock: Callable[[], float] = monotonic

    def __post_init__(self) -> None:
        after = self.after
        if after is not None and (isinstance(after, bool) or not isinstance(after, int | float) or not after > 0):
            raise ValueError(f"stall_after is {after!r}, expected a number of seconds above 0, or None")
        if self.on_stall not in ("log", "raise"):
            raise ValueError(f"on_stall is {self.on_stall!r}, expected 'log' or 'raise'")
        if self.on_stall == "raise" and after is None:
            raise ValueError("on_stall is 'raise' and stall_after is None: expected a number of seconds")

    @property
    def look_s(self) -> float:
        """Seconds between two looks."""
        return _LOOK_S if self.after is None else min(_LOOK_S, self.after / 10)


class LongCalls:
    """Long calls of the parties, as seen by looks: a call that lasts less than a look is short, and not seen.

    That is enough: a short call's time never raises a limit above `after`.
    """

    def __init__(self) -> None:
        self._longest: dict[tuple[str, str], list[float]] = {}

    def add(self, wait: Wait, seconds: float) -> None:
        """Note that a call has ended which was seen to last so many seconds."""
        seen = self._longest.setdefault((wait.party, wait.doing), [])
        seen.append(seconds)
        if len(seen) > _KEPT:
            seen.remove(min(seen))

    def p99(self, wait: Wait) -> float:
        """Seconds that all but one in a hundred calls like this one took; 0: less than a look. Of resets the longest.

        Resets are rare among the steps that they are counted with.
        """
        seen = sorted(self._longest.get((wait.party, wait.doing), ()), reverse=True)
        left_out = 0 if wait.limit == "reset" else max(wait.calls, len(seen)) // 100
        return seen[left_out] if left_out < len(seen) else 0.0

    def limit(self, wait: Wait, after: float) -> float:
        """Seconds that this party may take before it is what stalls the run."""
        if wait.kind == "lost":
            return max(after, _FIRST_S)
        if wait.kind != "call":
            return after
        usual = max(after, _TIMES * self.p99(wait))
        if wait.limit == "sink":
            return max(usual, _SINK_S) if wait.calls >= _CALLS else inf
        if wait.limit == "compile" and wait.calls < _CALLS:
            return max(usual, _COMPILE_S)
        return usual if wait.calls else max(usual, _FIRST_S)


@dataclass(slots=True)
class _Seen:
    """A party that has not got on since some time.

    looks    number of looks that found it so
    """

    wait: Wait
    since: float
    looks: int = 1


@dataclass(slots=True)
class _Told:
    """A stall that was told: its way, when it began, since when the consumer waits, and how often it was told."""

    key: Any
    since: float
    waits_since: float | None
    times: int = 0


class StallWatch:
    """Follows a run by looks, and says when it is stalled.

        probe          gives the looks
        rules          when and how it speaks
        is_debugged    whether a debugger holds this process

    It keeps no thread and reads no time but that of the rules' clock. `look` is to be called every `rules.look_s`.
    """

    def __init__(self, probe: Probe, rules: StallRules, is_debugged: Callable[[], bool] = is_debugged_now) -> None:
        self._probe, self._rules, self._is_debugged = probe, rules, is_debugged
        self._after = 5.0 if rules.after is None else rules.after
        self._times = LongCalls()
        self._seen: dict[str, _Seen] = {}
        self._left: tuple[int, ...] = ()  # items that have left, by exit
        self._since: float | None = None  # when a consumer began to wait, or the last item left after that
        self._last: float | None = None  # end of the last look
        self._told: _Told | None = None
        self._signs: Sequence[Sign] = ()  # found by the last look
        self._notes: dict[str, float] = {}  # kind -> when it was there last

    def look(self) -> tuple[list[str], Diagnosis | None]:
        """Look once: texts to be logged, and the diagnosis of a stall if one is told for the first time."""
        now = self._rules.clock()
        if self._last is not None and now - self._last > self._rules.look_s + _LATE_S:  # the machine stood still
            self._begin_anew()
        found = self._look_at(now)
        self._last = self._rules.clock()  # to ask a worker, a host or a trainer takes its time
        return found

    def finish(self) -> list[str]:
        """Texts to be logged at the end of the run."""
        return self._over("it has ended")

    def diagnose(self) -> Diagnosis:
        """Diagnosis of the run right now, with the silent faults that the last look found. From any thread."""
        look, now = self._probe.look(), self._rules.clock()
        way = () if look is None else self._way(look)
        if look is None or not way:
            return diagnosed(look, (), 0.0, 0.0, self._signs, is_stalled=False)
        blocker = way[-1]
        seen, stood = self._seen.get(blocker.name), blocker.age_s
        if seen is not None and seen.wait.mark == blocker.mark and seen.wait.kind == blocker.kind:
            stood = max(stood, now - seen.since)
        waited = 0.0 if self._since is None else now - self._since
        is_stalled = self._told is not None or (self._since is not None and self._is_stall(way, waited, stood))
        waited = max(waited, min(stood, way[0].age_s))
        return diagnosed(look, way, waited, stood, self._signs, is_stalled=is_stalled)

    # Inside

    def _look_at(self, now: float) -> tuple[list[str], Diagnosis | None]:
        look = self._probe.look()
        if look is None:
            return self.finish(), None
        self._follow(look, now)
        gone = now - AGAIN_S[0]  # what was there later than that is told already
        self._signs = self._probe.signs()
        texts = [sign.text for sign in self._signs if self._notes.get(sign.kind, gone) <= gone]
        self._notes.update((sign.kind, now) for sign in self._signs)
        found = self._stalled(look, now)
        if found is None:
            still = self._told is not None and self._since == self._told.waits_since  # another party holds it up now
            return texts + ([] if still else self._over("it goes on")), None
        way, begun = found
        return self._tell(look, way, begun, now, texts)

    def _begin_anew(self) -> None:
        """Count no wait before now: this process, or its machine, stood still itself."""
        self._seen.clear()
        self._since = None

    def _follow(self, look: Look, now: float) -> None:
        """Take note of who has got on since the last look, and of long calls that have ended."""
        for party, wait in look.waits.items():
            seen = self._seen.get(party)
            if seen is not None and seen.wait.mark == wait.mark and seen.wait.kind == wait.kind:
                seen.looks += 1
                seen.wait = wait
                continue
            if seen is not None:
                self._note_end(seen, now)
            self._seen[party] = _Seen(wait, now - min(wait.age_s, self._rules.look_s))
        for party in self._seen.keys() - look.waits.keys():
            self._note_end(self._seen.pop(party), now)
        left = tuple(each.items for each in look.exits)
        if left != self._left or not any(each.waits for each in look.exits):
            self._left, self._since = left, None
        if self._since is None and any(each.waits for each in look.exits):
            self._since = now

    def _note_end(self, seen: _Seen, now: float) -> None:
        if seen.wait.kind == "call" and seen.looks > 1:
            self._times.add(seen.wait, now - seen.since)

    def _way(self, look: Look) -> Way:
        """The way from a consumer that waits."""
        ways = [way for each in look.exits if each.waits and (way := way_from(each.party, look.waits))]
        return max(ways, key=lambda way: (way[-1].kind not in _NO_STALL, way[-1].age_s), default=())

    def _stalled(self, look: Look, now: float) -> tuple[Way, float] | None:
        """The way to the final blocker of a stall, and since when; None: there is none."""
        way = self._way(look)
        if not way or self._since is None:
            return None
        seen = self._seen.get(way[-1].name)
        if seen is None or seen.looks < 2:
            return None
        if now - seen.since >= self._after / _DEBUGGER_LOOKS and self._is_debugged():
            self._begin_anew()
            return None
        if not self._is_stall(way, now - self._since, now - seen.since):
            return None
        return way, min(self._since, seen.since) if self._told is None else self._told.since

    def _is_stall(self, way: Way, waited_s: float, stood_s: float) -> bool:
        if way[-1].kind in _NO_STALL:
            return False
        limit = self._after if is_closed(way) else self._times.limit(way[-1], self._after)
        return waited_s >= self._after and stood_s >= limit

    def _tell(
        self, look: Look, way: Way, since: float, now: float, texts: list[str]
    ) -> tuple[list[str], Diagnosis | None]:
        key = tuple((wait.party, wait.kind) for wait in way)
        told, is_new = self._told, self._told is None or self._told.key != key
        if told is None or is_new:
            told = self._told = _Told(key, since, self._since)
        if not is_new and now - told.since < _due(told.times):
            return texts, None
        told.times += 1
        stood = now - self._seen[way[-1].name].since
        found = diagnosed(look, way, now - (self._since or now), stood, self._signs, is_stalled=True)
        return [*texts, str(found)], found if is_new else None

    def _over(self, how: str) -> list[str]:
        """The line that says how a stall is over, if one was told."""
        told, self._told = self._told, None
        return [] if told is None else [f"{how}: it stood still for {self._rules.clock() - told.since:.1f} s"]


def _due(times: int) -> float:
    """Seconds of standing still after which a stall is told again, having been told so often."""
    if times <= len(AGAIN_S):
        return AGAIN_S[times - 1]
    return AGAIN_S[-1] * (times - len(AGAIN_S) + 1)
