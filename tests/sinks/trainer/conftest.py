"""Fixtures for tests of trainers."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
from memory_lending import shared_address

from rollflow.sinks.trainer.trainer_side.borrower import fragments_in
from rollflow.stream.wire import Fragment


@pytest.fixture(params=["unix", "shm"])
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    """Address of a trainer on this host: a socket, or shared memory."""
    with shared_address() as shared:
        yield f"{request.param}:{shared.removeprefix('shm:')}"


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of items that came to a trainer as one message, for each message."""
    counts: list[int] = []

    def counted(message: Any, borrower: Any) -> list[Fragment]:
        fragments = fragments_in(message, borrower)
        counts.append(len(fragments))
        return fragments

    monkeypatch.setattr("rollflow.sinks.trainer.trainer_side.listener.fragments_in", counted)
    return counts


@pytest.fixture
def loaders_end_with_their_test() -> Iterator[None]:
    """A DataLoader's processes end when it is collected."""
    yield
    gc.collect()
