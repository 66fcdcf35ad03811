"""Wakeup: a waiter misses no call that was made for it."""

import select
import threading

from rollflow.stream.graph.wakeup import Wakeup


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
