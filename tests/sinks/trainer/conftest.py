"""What tests of several kinds begin or end with."""

import gc
from collections.abc import Iterator

import pytest
from lending import shared_address


@pytest.fixture(params=["unix", "shm"])
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    """Of a trainer on this host, by a socket and by shared memory."""
    with shared_address() as shared:
        yield f"{request.param}:{shared.removeprefix('shm:')}"


@pytest.fixture
def loaders_end_with_their_test() -> Iterator[None]:
    """A DataLoader's processes end when it is collected."""
    yield
    gc.collect()
