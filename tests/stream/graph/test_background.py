"""Waiting for nodes whose work goes on elsewhere."""

import threading
from typing import Any

import pytest

from rollflow.stream.graph.background import Waiter
from rollflow.stream.graph.meter import NodeMeter
from rollflow.stream.graph.wakeup import Wakeup


class Elsewhere:
    """A background node whose descriptor can be read."""

    patience = None

    def __init__(self) -> None:
        self.in_flight = 0
        self.bell = Wakeup()
        self.bell.ring()

    def fileno(self) -> int:
        return self.bell.fileno()

    def completed(self) -> list[Any]:
        return []


@pytest.mark.parametrize("in_flight", [0, 1])
def test_only_nodes_with_items_in_flight_end_a_wait(in_flight: int) -> None:
    node, bell = Elsewhere(), Wakeup()
    waiter = Waiter([(node, NodeMeter("elsewhere"))], bell)
    for flies in (1 - in_flight, in_flight):
        node.in_flight = flies
        waited = threading.Event()

        def wait(waited: threading.Event = waited) -> None:
            waiter.wait()
            waited.set()

        thread = threading.Thread(target=wait)
        thread.start()
        if flies:
            assert waited.wait(60)
        else:
            assert not waited.wait(0.1)
            bell.ring()
        thread.join(60)
        assert not thread.is_alive()
