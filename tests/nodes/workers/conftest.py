"""A clock that is the test's own."""

from collections.abc import Callable

import pytest


@pytest.fixture
def forward(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets time go by for those who wait for environments; it stands still otherwise."""
    now = [0.0]

    def forward(seconds: float) -> None:
        now[0] += seconds

    for module in ("deadlines", "watch", "lane_link", "lane_processes"):
        monkeypatch.setattr(f"rollflow.nodes.workers.{module}.monotonic", lambda: now[0])
    return forward
