from collections.abc import Iterator

import pytest

from rollflow.policy.serving.shelf import Shelf


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    shelf = Shelf()
    yield shelf
    shelf.close()
