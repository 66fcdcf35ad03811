"""What tests of pages share."""

from collections.abc import Iterator

import pytest
from forked_programs import Programs


@pytest.fixture(scope="session")
def programs() -> Iterator[Programs]:
    """What starts programs that begin with rollflow imported."""
    started = Programs()
    yield started
    started.process.communicate()
