"""What is told of an error of closing, beside what has ended the block."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from rollflow.stream.data.closing import ClosedOnExit, closing_on_error, noting_in
from rollflow.stream.data.errors import DatasetError


def close() -> None:
    error = DatasetError("47 steps are not in the dataset")
    error.add_note("in node 'sink'")
    raise error


class Sink(ClosedOnExit):
    def close(self) -> None:
        close()


@contextmanager
def noting() -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        with noting_in(error, "the sink"):
            close()
        raise


WAYS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], str]] = {
    "with": (Sink, "Sink"),
    "noting_in": (noting, "the sink"),
    "closing_on_error": (lambda: closing_on_error(close), "what was open"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("kind", "is_noted"),
    [
        (ValueError, True),
        (KeyboardInterrupt, True),
        (SystemExit, False),
        (GeneratorExit, False),
        (asyncio.CancelledError, False),
    ],
)
def test_an_error_of_closing_is_a_note_of_a_shown_error(way: str, kind: type[BaseException], is_noted: bool) -> None:
    open_block, what = WAYS[way]
    with pytest.raises(kind if is_noted else DatasetError) as raised, open_block():
        raise kind
    if is_noted:
        assert raised.value.__notes__ == [
            f"closing {what} raised as well: DatasetError: 47 steps are not in the dataset; in node 'sink'; "
            "see docs/how_to/datasets.md#when-it-refuses"
        ]
    else:
        assert isinstance(raised.value.__context__, kind)


def test_an_error_of_closing_is_raised_where_nothing_was_before() -> None:
    with pytest.raises(DatasetError, match="47 steps"), Sink():
        pass
