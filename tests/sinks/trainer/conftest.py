"""Fixtures for tests of trainers."""

from collections.abc import Iterator

import pytest
from memory_lending import shared_address


@pytest.fixture(params=["unix", "shm"])
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    """Address of a trainer on this host: a socket, or shared memory."""
    with shared_address() as shared:
        yield f"{request.param}:{shared.removeprefix('shm:')}"
