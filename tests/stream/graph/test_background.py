"""Waiting for nodes whose work goes on elsewhere, and the signal that ends a wait."""

import select
import threading
from typing import Any

import pytest

from rollflow.stream.graph.background import wait_for_any
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
    for flies in (1 - in_flight, in_flight):
        node.in_flight = flies
        waited = threading.Event()

        def wait(waited: threading.Event = waited) -> None:
            wait_for_any([(node, NodeMeter("elsewhere"))], bell)
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


def can_be_read(bell: Wakeup) -> bool:
    return bool(select.select([bell], [], [], 0)[0])


def test_it_can_be_read_from_the_first_ring_until_it_is_silenced() -> None:
    bell = Wakeup()
    assert not can_be_read(bell)
    bell.silence()
    bell.ring()
    bell.ring()
    assert can_be_read(bell)
    bell.silence()
    assert not can_be_read(bell)
    bell.ring()
    assert can_be_read(bell)
    bell.close()


def test_nothing_that_several_threads_ring_for_is_missed() -> None:
    bell, counts = Wakeup(), [0, 0, 0]

    def ring(index: int) -> None:
        for _ in range(3000):
            counts[index] += 1
            bell.ring()

    threads = [threading.Thread(target=ring, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    while sum(counts) < 9000:
        select.select([bell], [], [])  # for ever, were one missed
        bell.silence()
    for thread in threads:
        thread.join()
    bell.close()
