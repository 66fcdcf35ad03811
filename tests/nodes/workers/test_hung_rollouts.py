"""Workers that do whole rollouts, and are taken for hung when they are, and only then. The clock is the test's own."""

import select
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from held import Held, await_held, let_go
from numbered import NumberedModule

from rollflow.nodes import Rollout

Forward = Callable[[float], None]


@pytest.fixture
def forward(monkeypatch: pytest.MonkeyPatch) -> Forward:
    """Lets time go by for those who wait for workers; it stands still otherwise."""
    now = [0.0]

    def forward(seconds: float) -> None:
        now[0] += seconds

    for module in ("patience", "lane_link", "process_environments"):
        monkeypatch.setattr(f"rollflow.nodes.workers.{module}.monotonic", lambda: now[0])
    return forward


def rollouts_of(makers: Any, **options: Any) -> Any:
    """A node that does whole rollouts, in one process."""
    given: dict[str, Any] = {"workers": 1, "fragment_length": 5, "seed": 0, "module": NumberedModule(), **options}
    return Rollout(makers, where="rollouts", **given).environments


@pytest.fixture
def closing() -> Iterator[Callable[[Any], Any]]:
    """Closes nodes."""
    nodes: list[Any] = []

    def added(node: Any) -> Any:
        nodes.append(node)
        return node

    yield added
    for node in nodes:
        node.close()


def come_back(node: Any, count: int = 1) -> list[Any]:
    """The next lanes that come back."""
    lanes: list[Any] = []
    while len(lanes) < count:
        assert select.select([node], [], [], 60)[0]
        lanes += node.completed()
    return lanes


def test_a_steady_worker_is_not_taken_for_hung(tmp_path: Path, forward: Forward, closing: Any) -> None:
    node = closing(rollouts_of(partial(Held, 0, tmp_path, steps=[3, 8, 13]), step_timeout=1.0, reset_timeout=1.0))
    [lane] = node.start()
    for times in range(3):
        node(lane)
        await_held(tmp_path, 0, times)
        forward(1.5)
        assert list(node.completed()) == []
        let_go(tmp_path, 0, times)
        assert come_back(node) == [lane]
        assert lane.fragment.num_rows == 5
    assert node.lost_steps == 0


def test_one_that_stands_still_is(tmp_path: Path, forward: Forward, closing: Any) -> None:
    node = closing(rollouts_of(partial(Held, 0, tmp_path, steps=[8]), step_timeout=1.0))
    [lane] = node.start()
    node(lane)
    come_back(node)
    node(lane)
    await_held(tmp_path, 0)
    forward(1.5)
    list(node.completed())
    assert node.lost_steps == 0  # it has made steps in this time
    forward(1.5)
    list(node.completed())
    assert node.lost_steps == 3 + 1
