"""Whoever waits on a bell misses nothing that it was rung for."""

import select
import threading

from rollflow.stream.bell import Bell


def can_be_read(bell: Bell) -> bool:
    return bool(select.select([bell], [], [], 0)[0])


def test_it_can_be_read_from_the_first_ring_until_it_is_silenced() -> None:
    bell = Bell()
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
    bell, counts = Bell(), [0, 0, 0]

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
