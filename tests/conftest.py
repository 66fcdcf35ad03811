import os
import time

import hypothesis
import pytest

# How long an example takes says nothing of whether it is right.
hypothesis.settings.register_profile("rollflow", deadline=None)
hypothesis.settings.load_profile("rollflow")

# Seconds since the epoch, after which no slow test begins: on a slow machine those that are quick come first.
SLOW_UNTIL = float(os.environ.get("ROLLFLOW_SLOW_UNTIL", "inf"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests last."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > SLOW_UNTIL and item.get_closest_marker("slow") is not None:
        pytest.skip("the time for slow tests is over on this machine")


@pytest.fixture(
    params=[
        pytest.param(("asyncio", {"use_uvloop": False}), id="asyncio"),
        pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop"),
        pytest.param(("trio", {}), id="trio"),
    ]
)
def anyio_backend(request: pytest.FixtureRequest) -> object:
    """Every asynchronous test runs on each of these."""
    return request.param
