"""The pieces of a pipeline: their names, their timers, and checks of what a user puts in."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollflow.nodes.connectors.alpha.pieces import as_connector_v2
from rollflow.nodes.connectors.connector_v2 import ConnectorV2
from rollflow.stream.data.errors import ConnectorError, page_on

NameOrClass = str | type


class NoSuchPiece(ConnectorError):
    """Raised when a pipeline has no piece of a name or a class."""


def names_of(pieces: Sequence[ConnectorV2]) -> list[str]:
    """The names that pieces go by, in order."""
    names: list[str] = []
    for piece in pieces:
        count = sum(piece.name == other.name for other in pieces[: len(names)])
        names.append(piece.name if not count else f"{piece.name}_{count + 1}")
    return names


def place_of(pieces: Sequence[ConnectorV2], name_or_class: NameOrClass, pipeline: str) -> int:
    """Place of the piece that has the name, or is of the class, or else of a subclass.

    pipeline    name of the pieces' pipeline, for the error

    Raises NoSuchPiece where there is none, and ConnectorError for a class that several pieces are of.
    """
    names = names_of(pieces)
    if isinstance(name_or_class, str):
        asked, places = name_or_class, [place for place, name in enumerate(names) if name == name_or_class]
    else:
        asked, places = name_or_class.__name__, [i for i, each in enumerate(pieces) if type(each) is name_or_class]
        places = places or [i for i, each in enumerate(pieces) if isinstance(each, name_or_class)]
    if not places:
        raise NoSuchPiece(f"{pipeline} has no piece '{asked}'; pieces: {', '.join(names) or 'none'}")
    if len(places) > 1:
        raise ConnectorError(
            f"{pipeline} has {len(places)} pieces of class '{asked}', expected a name that says "
            f"which: {', '.join(names[place] for place in places)}"
        )
    return places[0]


def check_kind(pieces: Sequence[ConnectorV2], kind: str) -> None:
    """Raise ConnectorError for a piece that belongs in pipelines of another kind, also within inner pipelines.

    kind    of the pipeline; empty: it takes any piece
    """
    for piece in pieces:
        if kind and piece.pipelines and kind not in piece.pipelines:
            raise ConnectorError(
                f"{piece.name} is put into the {kind} pipeline, expected in the {' or '.join(piece.pipelines)} pipeline"
            )
        check_kind(getattr(piece, "connectors", ()), kind)


def check_distinct(pieces: Sequence[ConnectorV2], pipeline: str) -> None:
    """Raise ConnectorError where a pipeline would have one piece twice, or two pieces that go by one name."""
    names = names_of(pieces)
    for place, (piece, name) in enumerate(zip(pieces, names, strict=True)):
        if any(piece is other for other in pieces[:place]):
            raise ConnectorError(
                f"{pipeline}: the same {piece.name} object twice, expected two objects: each has its own state"
            )
        if name in names[:place]:
            raise ConnectorError(
                f"{pipeline}: two pieces called '{name}', expected different names; pieces: {', '.join(names)}"
            )


def parts_asked_for(
    components: str | Collection[str], pieces: Sequence[ConnectorV2], pipeline: str
) -> dict[str, list[str] | None]:
    """Name of a piece -> names inside it, by "outer/inner"; None for all of it.

    Raises NoSuchPiece for a name of no piece.
    """
    asked: dict[str, list[str] | None] = {}
    for component in {components} if isinstance(components, str) else components:
        name, _, inside = component.partition("/")
        place_of(pieces, name, pipeline)
        inner = asked.setdefault(name, [])
        if not inside:
            asked[name] = None
        elif inner is not None:
            inner.append(inside)
    return asked


def pieces_of(made: Any, what: str) -> list[ConnectorV2]:
    """The pieces that a connector builder function returned; Alpha connectors become pieces, too.

    Raises ConnectorError for anything else.
    """
    pieces = list(map(as_connector_v2, made if isinstance(made, list | tuple) else [made]))
    for piece in pieces:
        if not isinstance(piece, ConnectorV2):
            raise ConnectorError(
                f"{what} returned {_class_of(piece)}, expected a ConnectorV2 piece or a list of pieces"
            )
    return pieces


def check_piece(piece: Any) -> None:
    """Raise ConnectorError unless it is a piece."""
    if not isinstance(piece, ConnectorV2):
        raise ConnectorError(f"{piece!r} is {_class_of(piece)}, expected a ConnectorV2 piece")


def note_of_piece(error: Exception) -> None:
    """Add to an error that a piece raised what is the likely mistake, where its kind says so."""
    if isinstance(error, TypeError):
        error.add_note(
            f"a piece is called with rl_module, batch, episodes, explore, shared_data, metrics; {page_on('piece')}"
        )
    elif isinstance(error, AttributeError) and isinstance(error.obj, list):
        error.add_note(
            "a piece that reads columns sets columnar = True in its own class, since a class that overrides __call__ "
            f"does not inherit it; this one is given a plain list of episodes; {page_on('piece')}"
        )
    elif isinstance(error, ValueError) and "read-only" in str(error):
        error.add_note(
            "observations of a batch, and columns of episodes, are the very rows that are recorded; expected a new "
            f"array: batch['obs'] = batch['obs'] * 2 rather than batch['obs'] *= 2; {page_on('piece')}"
        )


def _class_of(piece: Any) -> str:
    return f"the class {piece.__name__}, not {piece.__name__}()" if isinstance(piece, type) else type(piece).__name__


@dataclass(slots=True)
class FusedTimer:
    """Calls of several pieces as one, and the time that they took together.

    pieces      their names, in order
    calls       of all of them as one
    total_ns    nanoseconds
    """

    pieces: tuple[str, ...] = ()
    calls: int = 0
    total_ns: int = 0

    @property
    def mean_us(self) -> float:
        """Microseconds a call of all of them."""
        return self.total_ns / self.calls / 1e3 if self.calls else 0.0


@dataclass(slots=True)
class Timer:
    """Calls of a piece, and the time that it took by itself.

    calls       in all
    total_ns    nanoseconds in calls of this piece alone
    fused       the other calls: as one with the pieces beside it, by the group of pieces
    """

    calls: int = 0
    total_ns: int = 0
    fused: tuple[FusedTimer, ...] = ()

    @property
    def mean_us(self) -> float:
        """Microseconds a call of this piece alone; NaN where all calls were as one with others."""
        alone = self.calls - sum(fused.calls for fused in self.fused)
        if not alone:
            return math.nan if self.calls else 0.0
        return self.total_ns / alone / 1e3


class PieceTimers:
    """Timers of each piece of a pipeline, and of those pieces together that were called as one.

    pairs    (piece, its timer), in order
    fused    timer of the last pieces, where they are called as one
    """

    def __init__(self) -> None:
        self.pairs: list[tuple[Any, Timer]] = []
        self.fused = FusedTimer()
        self._groups: list[tuple[list[Any], FusedTimer]] = []  # pieces that are, or were, called as one

    def arrange(self, pieces: Sequence[Any], fused_from: int) -> None:
        """Set the pieces.

        fused_from    place of the first of the last pieces, which are called as one; -1: none are
        """
        before = {id(piece): timer for piece, timer in self.pairs}
        self.pairs = [(piece, before.get(id(piece), Timer())) for piece in pieces]
        self._groups = [(group, timer) for group, timer in self._groups if timer.calls and _are_in(group, pieces)]
        fused = [] if fused_from < 0 else list(pieces[fused_from:])
        for group, timer in self._groups:
            if len(group) == len(fused) and _are_in(group, fused):
                self.fused = timer
                return
        self.fused = FusedTimer()
        self._groups.append((fused, self.fused))

    def named(self, names: Sequence[str]) -> dict[str, Timer]:
        """Name -> timer of every piece."""
        name_of = {id(piece): name for (piece, _), name in zip(self.pairs, names, strict=True)}
        timers = {}
        for piece, timer in self.pairs:
            fused = tuple(
                replace(together, pieces=tuple(name_of[id(each)] for each in group))
                for group, together in self._groups
                if together.calls and _are_in([piece], group)
            )
            calls = timer.calls + sum(together.calls for together in fused)
            timers[name_of[id(piece)]] = replace(timer, calls=calls, fused=fused)
        return timers


def _are_in(some: Sequence[Any], pieces: Sequence[Any]) -> bool:
    """True if all of some objects are among the pieces, by identity."""
    return all(any(each is piece for piece in pieces) for each in some)
