"""What tests of several kinds begin or end with."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
from lending import shared_address

from rollflow.sinks.trainer.shared.borrower import fragments_in
from rollflow.stream.wire import Fragment


@pytest.fixture(params=["unix", "shm"])
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    """Of a trainer on this host, by a socket and by shared memory."""
    with shared_address() as shared:
        yield f"{request.param}:{shared.removeprefix('shm:')}"


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many came to a trainer as one, again and again."""
    counts: list[int] = []

    def counted(message: Any, borrower: Any) -> list[Fragment]:
        fragments = fragments_in(message, borrower)
        counts.append(len(fragments))
        return fragments

    monkeypatch.setattr("rollflow.sinks.trainer.door.fragments_in", counted)
    return counts


@pytest.fixture
def loaders_end_with_their_test() -> Iterator[None]:
    """A DataLoader's processes end when it is collected."""
    yield
    gc.collect()
