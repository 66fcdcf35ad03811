"""Delayed Ctrl-C: a run in the main thread holds KeyboardInterrupt back where it would lose an item.

Python raises KeyboardInterrupt between any two instructions. Within the engine that would lose the current item: a
lane, a fragment. So a run holds it back there. It lets it through in long user code and while it waits. A second
Ctrl-C is raised at once.
"""

import signal
import threading
from types import FrameType, TracebackType


class _Interrupts(threading.local):
    """State of delayed interrupts, for each thread: Python calls signal handlers in the main thread only.

    lets_through    whether Ctrl-C may be raised now
    held            number of interrupts that have come and were not raised
    is_forced       whether a second one was raised where it should have been held back
    """

    lets_through = False
    held = 0
    is_forced = False


interrupts = _Interrupts()


class HoldingBack:
    """A block in which Ctrl-C is raised only while `interrupts.lets_through`, by `raise_held`, and at the block's end.

    It does nothing in other threads, or if SIGINT has another handler than Python's own. It may be entered again.
    """

    __slots__ = ("_is_handling",)

    def __enter__(self) -> None:
        is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        self._is_handling = is_ours and threading.current_thread() is threading.main_thread()
        if self._is_handling:
            interrupts.held, interrupts.is_forced = 0, False
            signal.signal(signal.SIGINT, _hold)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_handling:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if not isinstance(error, KeyboardInterrupt):
                raise_held()


def can_interrupt() -> bool:
    """True if SIGINT raises KeyboardInterrupt in the main thread, at once or when it is sent a second time."""
    return signal.getsignal(signal.SIGINT) in (signal.default_int_handler, _hold)


def raise_held() -> None:
    """Raise KeyboardInterrupt if one is held back."""
    if interrupts.held:
        interrupts.held = 0
        raise KeyboardInterrupt


def _hold(number: int, frame: FrameType | None) -> None:
    if interrupts.lets_through or interrupts.held:
        interrupts.is_forced = not interrupts.lets_through
        interrupts.held = 0
        raise KeyboardInterrupt
    interrupts.held += 1
