"""Pieces in order that go by names: lookup and edits, of `ConnectorPipelineV2` and of Alpha pipelines."""

import abc
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from rollflow.nodes.connectors.state_watch import checked_state
from rollflow.stream.data.errors import ConnectorError, shown

NameOrClass = str | type


def names_of(names: Collection[str]) -> list[str]:
    """The names that pieces go by, in order, by what each is called: the second `Name` is `Name_2`."""
    made: list[str] = []
    called = list(names)
    for place, name in enumerate(called):
        count = called[:place].count(name)
        made.append(f"{name}_{count + 1}" if count else name)
    return made


class NamedPieces(abc.ABC):
    """Base of pipelines: pieces that are called in order, with a name each."""

    name: Any  # of the pipeline
    _pieces: list[Any]

    @property
    @abc.abstractmethod
    def names(self) -> list[str]:
        """The pieces' names, in order."""

    @abc.abstractmethod
    def _edit(self, pieces: list[Any]) -> None:
        """Have these pieces, in the place of those that are there. Raises ConnectorError where that can't be."""

    def __len__(self) -> int:
        return len(self._pieces)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._pieces)

    def __repr__(self) -> str:
        return f"<{self.name}: {' → '.join(self.names) or 'empty'}>"

    def insert_before(self, name_or_class: NameOrClass, connector: Any) -> Any:
        """Put a piece in front of another, which is returned. Raises ConnectorError when there is no such piece."""
        return self._insert(self._place(name_or_class), 0, connector)

    def insert_after(self, name_or_class: NameOrClass, connector: Any) -> Any:
        """Put a piece behind another, which is returned. Raises ConnectorError when there is no such piece."""
        return self._insert(self._place(name_or_class), 1, connector)

    def prepend(self, connector: Any) -> None:
        """Put a piece at the beginning."""
        self._edit([connector, *self._pieces])

    def append(self, connector: Any) -> None:
        """Put a piece at the end."""
        self._edit([*self._pieces, connector])

    def _without(self, name_or_class: NameOrClass) -> list[Any]:
        """The pieces but for one. Raises ConnectorError when there is no such piece."""
        place = self._place(name_or_class)
        return [*self._pieces[:place], *self._pieces[place + 1 :]]

    def _insert(self, place: int, offset: int, connector: Any) -> Any:
        found = self._pieces[place]
        self._edit([*self._pieces[: place + offset], connector, *self._pieces[place + offset :]])
        return found

    def _place(self, name_or_class: NameOrClass) -> int:
        """Place of the piece that has the name, or is of the class. Raises ConnectorError where there is none."""
        place = self._found(name_or_class)
        if place is None:
            raise ConnectorError(self._missing(name_or_class))
        return place

    def _found(self, name_or_class: NameOrClass) -> int | None:
        """Place of the piece that has the name, or is of the class, or else of a subclass; None where there is none.

        Raises ConnectorError for a class that several pieces are of.
        """
        names, pieces = self.names, self._pieces
        if isinstance(name_or_class, str):
            return names.index(name_or_class) if name_or_class in names else None
        places = [place for place, each in enumerate(pieces) if type(each) is name_or_class]
        places = places or [place for place, each in enumerate(pieces) if isinstance(each, name_or_class)]
        if len(places) > 1:
            raise ConnectorError(
                f"{self.name} has {len(places)} pieces of class '{name_or_class.__name__}', expected a name that says "
                f"which: {', '.join(names[place] for place in places)}"
            )
        return places[0] if places else None

    def _missing(self, name_or_class: NameOrClass) -> str:
        asked = name_or_class if isinstance(name_or_class, str) else name_or_class.__name__
        return f"{self.name} has no piece '{asked}'; pieces: {', '.join(self.names) or 'none'}"

    def _named(self) -> dict[str, Any]:
        return dict(zip(self.names, self._pieces, strict=True))

    def take_over_state(self, state: dict[str, Any]) -> None:
        """Do what `set_state` does, for the rollout that has merged the states of its workers or hosts."""
        pieces = self._named()
        self._check_names(state)
        for name, piece_state in state.items():
            try:
                getattr(pieces[name], "take_over_state", pieces[name].set_state)(piece_state)
            except Exception as error:
                error.add_note(f"in the state of connector piece '{name}' of {self.name}")
                raise

    def merge_states(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """Name -> merged state, piece by piece; a piece's own where `states` have none of it.

        Raises ConnectorError for a name of no piece.
        """
        for state in states:
            self._check_names(state)
        merged: dict[str, Any] = {}
        for name, piece in self._named().items():
            of_piece = [state[name] for state in states if name in state]
            method, result = (
                ("merge_states", piece.merge_states(of_piece)) if of_piece else ("get_state", piece.get_state())
            )
            if checked_state(name, method, result):
                merged[name] = result
        return merged

    def _check_names(self, state: Any) -> None:
        """Raise ConnectorError for a state that is none, or has a name of no piece."""
        if not isinstance(state, Mapping):
            raise ConnectorError(f"{self.name}: the state is {shown(state)}, expected a dict, as get_state gives it")
        unknown = sorted(set(state) - set(self.names))
        if unknown:
            raise ConnectorError(
                f"{self.name}: a state for {unknown}, expected {{name of a piece: its state}}, as get_state gives it; "
                f"pieces: {', '.join(self.names) or 'none'}"
            )
