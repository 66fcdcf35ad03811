"""Pieces in order that go by names: lookup and edits, of `ConnectorPipelineV2` and of Alpha pipelines."""

import abc
from collections.abc import Collection, Iterator
from typing import Any

from rollflow.stream.data.errors import ConnectorError

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
    def names(self) -> list[str]:
        """The pieces' names, in order: no two are the same."""
        return names_of([piece.name for piece in self._pieces])

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
