"""Properties that are worked out once: kept, and never waited for in another thread or process."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from threading import Event

from rollflow.stream.data.cached_property import cached_property


class Numbered:
    """Counts how often its property is worked out, and may be held up in it."""

    def __init__(self, number: int, *, is_held: bool = False) -> None:
        self.number, self.is_held, self.calls = number, is_held, 0
        self.has_begun, self.may_end = Event(), Event()

    @cached_property
    def squared(self) -> int:
        """Its number times itself."""
        self.calls += 1
        self.has_begun.set()
        if self.is_held:
            self.may_end.wait(60)
        return self.number**2


def test_a_property_is_worked_out_once_for_each_object() -> None:
    three, four = Numbered(3), Numbered(4)
    assert [three.squared, three.squared, four.squared] == [9, 9, 16]
    assert [three.calls, four.calls] == [1, 1]
    assert Numbered.squared.__doc__ == "Its number times itself."


def test_neither_a_thread_nor_a_forked_process_waits_for_a_thread_that_works_it_out() -> None:
    held = Numbered(3, is_held=True)
    with ThreadPoolExecutor() as threads:
        slow = threads.submit(lambda: held.squared)
        held.has_begun.wait(60)
        try:
            child = os.fork()
            if not child:
                signal.alarm(60)  # it would wait for ever
                os._exit(Numbered(4).squared)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 16
            assert threads.submit(lambda: Numbered(5).squared).result(60) == 25
        finally:
            held.may_end.set()
        assert slow.result(60) == 9
