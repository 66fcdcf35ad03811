"""Turns of a replay's two sides, inserts and samples: who waits for the other, and for how long."""

import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from math import inf
from time import monotonic
from typing import Any, Literal, TypeVar

import anyio

from rollflow.nodes.argument_checks import checked_number
from rollflow.stream.graph.node_errors import ending_quietly
from rollflow.stream.graph.wakeup import Wakeup
from rollflow.stream.net.backoff import WaitReminder

logger = logging.getLogger(__name__)

Side = Literal["insert", "sample"]
T = TypeVar("T")


class Turns:
    """Lets threads, or tasks of one event loop, wait until their side may go on.

    lock       held while anything is changed, or looked at
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._noted = threading.Condition(self.lock)
        self._waited: dict[Side, float] = {"insert": 0.0, "sample": 0.0}  # by waits that are over
        self._waiting: list[tuple[Side, float]] = []  # since when
        self._changed: anyio.Event | None = None  # where tasks wait
        self._loop_thread, self._bell = 0, Wakeup()  # rung by other threads than the event loop's

    @property
    def waiting(self) -> Side | None:
        """The side that waits now; None: neither does."""
        return self._waiting[0][0] if self._waiting else None

    def waited_s(self, side: Side) -> float:
        """Seconds for which a side has waited, until now."""
        now = monotonic()
        return self._waited[side] + sum(now - began for each, began in self._waiting if each == side)

    def enter_loop(self) -> None:
        """Let tasks of this event loop wait, from now on; `relay` is one of them."""
        self._changed, self._loop_thread = anyio.Event(), threading.get_ident()

    async def relay(self) -> None:
        """Have tasks look again whenever another thread has changed something; until this is cancelled."""
        while True:
            await anyio.wait_readable(self._bell.fileno())
            self._bell.silence()
            self.look_again()

    def notify(self) -> None:
        """Have those that wait look again; in any thread. The lock is held."""
        if self._waiting:
            self._noted.notify_all()
        if self._changed is None:
            return
        if self._loop_thread != threading.get_ident():
            self._bell.ring()
            return
        self._changed.set()
        self._changed = anyio.Event()

    def look_again(self) -> None:
        """Have those that wait look again. The lock is not held."""
        with self.lock:
            self.notify()

    def wait(self, side: Side, admits: Callable[[], T], wait_s: float | None, report: Callable[[], object]) -> T:
        """Wait, with the lock held, until a side may go on: what `admits` returned last.

        wait_s    seconds after which that may be false; None: any time
        report    what is logged at growing intervals, from 5 s on
        """
        if wait_s is not None and wait_s != 0.0:
            checked_number("wait_s", wait_s, least=0, most=inf, noun="seconds")
        found = admits()
        if found or wait_s == 0.0:
            return found
        patience = WaitReminder(wait_s)
        with self._counted(side):
            while not found and not patience.is_over:
                found = self._noted.wait_for(admits, patience.left)
                if not found and patience.is_long:
                    logger.warning("%s() waits for %.0f s: %s", side, patience.waited_s, report())
        return found

    async def wait_in_loop(self, side: Side, admits: Callable[[], bool]) -> None:
        """Wait in a task, without the lock, until a side may go on."""
        while True:
            with self.lock:
                if admits():
                    return
                changed = self._changed
            assert changed is not None
            with self._counted(side):
                await changed.wait()

    @contextmanager
    def _counted(self, side: Side) -> Iterator[None]:
        wait = side, monotonic()
        self._waiting.append(wait)
        try:
            yield
        finally:
            self._waiting.remove(wait)
            self._waited[side] += monotonic() - wait[1]


async def run_both(*parts: Callable[[], Awaitable[None]], beside: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run the parts side by side, and `beside` until they have ended.

    What one of them raises ends the others, and is raised as it is, in no group.
    """
    raised: Exception | None = None
    left = len(parts)
    async with anyio.create_task_group() as tasks:

        async def work(part: Callable[[], Awaitable[None]]) -> None:
            nonlocal raised, left
            try:
                await part()
            except Exception as error:
                raised = error
            left -= 1
            if raised is not None or not left:
                tasks.cancel_scope.cancel()

        tasks.start_soon(ending_quietly, beside)
        for part in parts:
            tasks.start_soon(ending_quietly, partial(work, part))
    try:
        if raised is not None:
            raise raised
    finally:
        del raised  # whose traceback refers to this frame
