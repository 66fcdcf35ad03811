"""Waits: what every party of a run is doing at one look, and the way along them to the final blocker.

A look is passive: it reads counters and marks that the parties write for themselves, without locks.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from rollflow.stream.observe.stacks import StackFrame

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
    """Gives looks at a run."""

    def look(self) -> Look | None:
        """All parties as they are now; None: the run has not begun, or has ended. From any thread."""
        ...

    def signs(self) -> Sequence[Sign]:
        """Silent faults that there are now, for the watch alone: they are found by what changes between its looks."""
        ...


@dataclass(frozen=True, slots=True)
class Way:
    """The way from a consumer to its final blocker; `is_closed`: the last party waits for an earlier one."""

    waits: tuple[Wait, ...]
    is_closed: bool = False

    @property
    def blocker(self) -> Wait:
        """The party at the end."""
        return self.waits[-1]


def way_from(party: str, waits: Mapping[str, Wait]) -> Way | None:
    """The way from a party to what it finally waits for; None: the party is not known.

    Where a party waits for several, a way that comes to an end goes before a closed one, and of those that do, the one
    to the party that has got on least lately.
    """
    ways = list(_ways((party,), waits))
    if not ways:
        return None
    ended = [way for way in ways if not way.is_closed]
    return max(ended or ways, key=lambda way: (way.blocker.kind != "waits", way.blocker.age_s))


def _ways(path: Sequence[str], waits: Mapping[str, Wait], most: int = 64) -> Iterator[Way]:
    wait = waits.get(path[-1])
    if wait is None:
        return
    known = [each for each in wait.on if each in waits]
    if not known:
        yield Way(tuple(waits[each] for each in path))
    for each in known[:most]:
        if each in path:
            yield Way(tuple(waits[name] for name in path[path.index(each) :]), is_closed=True)
        else:
            yield from _ways((*path, each), waits)


def by_name(waits: Iterable[Wait]) -> dict[str, Wait]:
    """Waits by their names."""
    return {wait.name: wait for wait in waits}
