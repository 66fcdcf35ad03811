"""Waits: what every party of a run is doing at one look, the way along them to the final blocker, and its diagnosis.

A look is passive: it reads counters and marks that the parties write for themselves, without locks.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_high
from typing import Any, Literal, NamedTuple, Protocol

from rollflow.stream.data.errors import HELP_PAGES, StallError
from rollflow.stream.observe.stacks import StackFrame, stack_lines

CALLER = "caller"
"""The code that reads the outputs of a run."""
Kind = Literal["call", "works", "holds back", "away", "lost", "waits"]
"""What a party does.

call          it is in a call that is expected to end soon: a step, a forward pass, a piece
works         it has work of its own, as a sink or the caller has: no stall by itself
holds back    it holds the others back on purpose, as a slow trainer does: no stall either
away          it is not there: a trainer or host that has not come
lost          it was lost, and begins anew later
waits         for others, which are in `on`
"""
Limit = Literal["reset", "compile", "sink"]


@dataclass(frozen=True, slots=True)
class Wait:
    """One party at one look.

    party     such as a node, by its name
    kind      what it does
    doing     the same in words: "is in step()", "waits for an item of source"
    on        `name`s of the waits that it waits for, if `kind` is "waits"
    mark      changes whenever the party gets on
    age_s     seconds since it last got on, as far as it says so itself
    calls     number of calls that it has completed
    where     lane, worker, process or host, in words
    limit     kind of a call that may take longer: a reset, one that may compile, a sink's
    remedy    what to change; "": the usual words for this kind
    stack     gives the stack of the thread that does it; empty: it has none here
    is_part   whether it stands for a task whose node is named by itself, and is left out of texts
    """

    party: str
    kind: Kind
    doing: str
    on: tuple[str, ...] = ()
    mark: Any = None
    age_s: float = 0.0
    calls: int = 0
    where: str = ""
    limit: Limit | None = None
    remedy: str = ""
    stack: Callable[[], tuple[StackFrame, ...]] = field(default=tuple, compare=False)
    is_part: bool = False

    @property
    def name(self) -> str:
        """The party and its place: no other wait of a look has the same."""
        return f"{self.party} ({self.where})" if self.where else self.party


@dataclass(frozen=True, slots=True)
class Exit:
    """A place where items leave the graph: an output with its reader, or a sink.

    party    name of the wait that the way to the blocker begins with
    items    number that have left
    waits    whether somebody waits there for the next one
    """

    party: str
    items: int
    waits: bool


class LastError(NamedTuple):
    """What went wrong last in a node that goes on all the same: its property `last_error`.

    age_s    seconds since; None: it is so still
    """

    text: str
    age_s: float | None


class Sign(NamedTuple):
    """Silent fault: something that flows, and can't be right. Each kind is told once; again if gone for a minute."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Look:
    """All parties of a run at one time.

    noun     word for what leaves the graph
    caller   seconds for which the caller has had each of its last items; empty: not known
    """

    exits: tuple[Exit, ...]
    waits: Mapping[str, Wait]
    noun: str = "item"
    caller: tuple[float, ...] = ()


class Probe(Protocol):
    """Gives looks at a run that is watched for stalls."""

    def look(self) -> Look | None:
        """All parties as they are now; None: the run has not begun, or has ended. From any thread."""
        ...

    def signs(self) -> Sequence[Sign]:
        """Silent faults that there are now, for the watch alone: they are found by what changes between its looks."""
        ...

    def end_stalled(self, error: StallError, /) -> None:
        """Have the run end with this error, as soon as it can. From any thread."""
        ...


Way = tuple[Wait, ...]
"""The way from a consumer to its final blocker, the last; closed if that waits for the first. Empty: there is none."""


def is_closed(way: Way) -> bool:
    """True if the last party of a way waits for the first: a deadlock."""
    return bool(way) and way[0].name in way[-1].on


def way_from(party: str, waits: Mapping[str, Wait]) -> Way:
    """The way from a party to what it finally waits for; empty: the party is not known.

    If a party waits for several, a way that comes to an end goes before a closed one, and of those that do, the one
    to the party that has got on least lately.
    """
    ways = list(_ways((party,), waits))
    ended = [way for way in ways if not is_closed(way)]
    return max(ended or ways, key=lambda way: (way[-1].kind != "waits", way[-1].age_s), default=())


def _ways(path: Sequence[str], waits: Mapping[str, Wait]) -> Iterator[Way]:
    wait = waits.get(path[-1])
    if wait is None:
        return
    known = [each for each in wait.on if each in waits]
    if not known:
        yield tuple(waits[each] for each in path)
    for each in known[:64]:  # whose ways may be many
        if each in path:
            yield tuple(waits[name] for name in path[path.index(each) :])
        else:
            yield from _ways((*path, each), waits)


def by_name(waits: Iterable[Wait]) -> dict[str, Wait]:
    """Waits by their names."""
    return {wait.name: wait for wait in waits}


_REMEDIES = {
    "call": "look at the line above: it has to return; on_stall='raise' breaks off what the main thread is in alone",
    "works": "nothing: it works. prefetch=1 lets the environments step meanwhile",
    "holds back": "nothing here: look at the trainer",
    "away": "start it, or look at its address and its log",
    "lost": "look at the warning in the log that says why it was lost",
    "waits": "look at what it waits for; nothing in this graph would end that wait",
}
_DEADLOCK = "give one of these edges more capacity, or have a node take items before it sends"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a run waits for at one time. `str(diagnosis)` is the text.

    state       "flows", "waits" for less than what a stall takes, "stalled", "caller works", or "not running"
    noun        word for what leaves the graph
    waited_s    seconds for which nothing has left while a consumer waits
    way         parties from the consumer to the final blocker; empty: nobody waits
    stood_s     seconds for which the final blocker has not got on
    stack       of the blocker's thread, innermost call first; empty: not known
    caller_s    seconds for which the caller has had each of its last items
    notes       silent faults, in words: what flows, and can't be right
    parties     what every party does
    """

    state: str
    noun: str = "item"
    waited_s: float = 0.0
    way: tuple[Wait, ...] = ()
    stood_s: float = 0.0
    stack: tuple[StackFrame, ...] = ()
    caller_s: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()
    parties: tuple[Wait, ...] = field(default=(), repr=False)

    @property
    def is_closed(self) -> bool:
        """True if the way is closed: a deadlock."""
        return is_closed(self.way)

    @property
    def blocker(self) -> Wait | None:
        """The party that all others wait for; None: there is none."""
        return self.way[-1] if self.way else None

    @property
    def remedy(self) -> str:
        """What to change, and where that is described."""
        blocker = self.blocker
        if blocker is None:
            return ""
        if self.is_closed:
            text = next((wait.remedy for wait in self.way if wait.remedy), _DEADLOCK)
        else:
            text = blocker.remedy or _REMEDIES[blocker.kind]
        return f"{text}; see docs/{HELP_PAGES['stall']}"

    def __str__(self) -> str:
        lines = [self._first_line(), *self.notes]
        if self.state in ("stalled", "waits"):
            lines += [*stack_lines(self.stack), f"do: {self.remedy}"]
        return "\n".join(lines)

    def _first_line(self) -> str:
        blocker = self.blocker
        if self.state == "caller works" and (blocker is None or blocker.party == CALLER):
            usual = f" (the median was {median_high(self.caller_s):.1f} s)" if self.caller_s else ""
            return f"the caller works: it has had its {self.noun} for {self.stood_s:.1f} s{usual}"
        if blocker is None:
            return {"not running": "it is not running"}.get(self.state, f"it flows: nobody waits for {_a(self.noun)}")
        begin = f"no {self.noun} for {self.waited_s:.1f} s: "
        if self.is_closed:
            edges = "; ".join(f"{wait.name} {wait.doing}" for wait in self.way if not wait.is_part)
            return f"{begin}deadlock: {edges}"
        text = f"{begin}{blocker.name} {blocker.doing} since {self.stood_s:.1f} s"
        others = list(dict.fromkeys(wait.party for wait in self.way[:-1] if not wait.is_part))
        return f"{text}; {_listed(others)} for it" if others and blocker.kind != "works" else text


def diagnosed(
    look: Look | None, way: Way, waited_s: float, stood_s: float, signs: Iterable[Sign], *, is_stalled: bool
) -> Diagnosis:
    """The diagnosis of a look, with the way from its consumer if one waits, and the silent faults found last."""
    if look is None:
        return Diagnosis("not running")
    state, caller = "flows", look.waits.get(CALLER)
    if way:
        state = "stalled" if is_stalled else "caller works" if way[-1].party == CALLER else "waits"
    elif caller is not None and caller.kind == "works" and caller.calls:
        state, stood_s = "caller works", caller.age_s
    return Diagnosis(
        state,
        look.noun,
        waited_s,
        way,
        stood_s,
        way[-1].stack() if way else (),
        look.caller,
        tuple(sign.text for sign in signs),
        tuple(look.waits.values()),
    )


def _listed(names: list[str]) -> str:
    text = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return f"{text} {'waits' if len(names) == 1 else 'wait'}"


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
