"""The driver of a rollout's ring, in its reader's thread or in one of its own, and the doctor that watches it."""

import logging
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from threading import get_ident
from time import monotonic
from typing import Any, TypeVar
from weakref import WeakMethod

import anyio
import anyio.lowlevel

from rollflow.nodes.stages.rounds import FragmentCredits
from rollflow.stream.data.errors import RunError, StallError
from rollflow.stream.graph.background import INTERRUPT_S
from rollflow.stream.graph.graph import Graph
from rollflow.stream.graph.inline_run import InlineRun
from rollflow.stream.graph.meter import NodeMeter, clock
from rollflow.stream.graph.run_doctor import Doctor, behind_loop
from rollflow.stream.graph.wakeup import Wakeup
from rollflow.stream.net import backoff
from rollflow.stream.observe.trace import FragmentName
from rollflow.stream.observe.waits import Look, Sign

T = TypeVar("T")

logger = logging.getLogger(__name__)
_LOOK_S = 0.05  # between two looks at whether a thread has ended
_NODES_CLOSE_S = 10.0  # nodes have limits of their own, as for worker processes


class Driver:
    """Runs a ring. One thread asks for fragments; any may close it.

    has_thread    whether the ring runs in a thread of its own, and may go on while the reader is at work; else in the
                  reader's, whenever that asks for a fragment

    A stall ends a wait for threads, workers or hosts at once. In the main thread it breaks off a call as Ctrl-C would,
    if that has Python's own handler. Any other call in the reader's thread raises the error once it returns.
    """

    def __init__(self, ring: Graph, credits: FragmentCredits, *, has_thread: bool) -> None:
        self.run, self._credits = InlineRun(ring, is_answering=has_thread), credits
        self._fragments: deque[Any] = deque()  # of a thread the last is None once there are no more
        self._stalled: StallError | None = None
        self._is_closed = False
        # Of a ring in the reader's thread.
        self._driving = 0  # thread that drives the run now; 0: none
        self._breaking = threading.Lock()  # held while `_driving` is cleared, or is broken off
        self._at_work = threading.RLock()  # held while the ring runs; `close` may come from another thread
        self._is_left = False
        # Of a ring in its own.
        self._thread = threading.Thread(target=self._work, name="rollflow ring", daemon=True) if has_thread else None
        self._commands: deque[Callable[[], None]] = deque()
        self._errors: list[BaseException] = []  # whoever raises one keeps no reference to it
        self._has_stopped = threading.Event()
        self._arrived = threading.Event()
        self._news: Wakeup | None = None  # for a reader in an event loop
        self._put_at = 0  # when a fragment came that the reader waited for, in ns
        self._reader = 0  # thread of the reader in an event loop

    def start(self) -> None:
        """Start the thread; else have the environments reset, and the first actions made.

        Raises RunError if it was closed meanwhile.
        """
        if self._thread is not None:
            self._thread.start()
            return
        with self._at_work:
            self._drive(self.run.__enter__)
            if self._is_left:
                self._end()
        if self._is_closed:
            raise RunError("the rollout was closed while its environments were being reset")

    def next(self) -> Any:
        """The next fragment; None when no more come, or it was closed. Raises what a node raised."""
        with self._at_work:
            with self.run.counters.caller.waits():
                self._await()
            return self._take()

    async def next_async(self) -> Any:
        """The next fragment, for a reader in an event loop, which a ring in its thread holds up while it works."""
        if self._thread is None:
            await anyio.lowlevel.checkpoint()
            return self.next()
        news = self._news = self._news or Wakeup()
        self._reader = get_ident()
        with self.run.counters.caller.waits():
            await anyio.lowlevel.checkpoint()
            news.silence()
            while not self._fragments:
                await anyio.wait_readable(news.fileno())
                news.silence()
        return self._take()

    def release(self, lanes: Sequence[int]) -> None:
        """Give back the credits of fragments, by their lanes."""
        self._command(self._credits.releasing(lanes))

    def drain(self) -> None:
        """Stop the environments; `next` gives what is left."""
        self._command(self.run.finish)

    def standing_still(self, look: Callable[[Sequence[Any]], T]) -> T:
        """Call a function while every lane stands at the gate, with the fragments that were not taken; its result.

        Raises RunError if the ring has ended in a thread, which has closed its nodes, and what the function raises.
        """
        results: list[T] = []
        errors: list[BaseException] = []
        is_done = threading.Event()

        def stand() -> None:
            try:
                with self._credits.shut():
                    self.run.settle()
                    results.append(look([*self._fragments, *(item for _, item, _ in self.run.chain.pending)]))
            except BaseException as error:
                errors.append(error)
            is_done.set()

        if self._thread is None:
            with self._at_work:  # `close` may come from another thread
                stand()
                if self._is_left:
                    self._end()
        else:
            self._command(stand)
        while not (is_done.wait(_LOOK_S) or self._has_stopped.is_set()):
            pass
        if errors:
            raise errors.pop()
        if not results:
            raise RunError("the run has ended, expected save() in its loop, before the last round is asked for")
        return results[0]

    def begin_with(self, fragments: Sequence[Any]) -> None:
        """Have these be taken first. Before it starts."""
        self._fragments.extend(fragments)

    def look(self) -> Look | None:
        """What every stage does right now, for the stall doctor; None: it does not run. From any thread.

        A reader may wait for an event loop that something holds up.
        """
        look, caller = self.run.look(), self.run.counters.caller
        if look is None or not (self._reader and self._fragments and caller.is_waiting):
            return look
        return behind_loop(look, self._put_at, max(caller.items, 1), self._reader)

    def end_stalled(self, error: StallError) -> None:
        """Have `next` raise this error, as soon as it can. From any thread."""
        if self._thread is not None:
            self._stalled = error
            self._put(None)
            return
        with self._breaking:
            if not self._driving:
                return
            self._stalled = error
            self.run.interrupt()
            is_in_main_thread = self._driving == threading.main_thread().ident
            raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
            if is_in_main_thread and raises and self.run.chain.mark[1] >= 0:  # in a call
                signal.pthread_kill(self._driving, signal.SIGINT)

    def close(self, error: BaseException | None) -> None:
        """Have the ring stop, once it is done with the item that it is at, and close the nodes.

        A thread is waited for, and what nobody has seen is raised. If an environment or the module hangs, a thread is
        left behind, and the reader's closes the nodes when it comes back, which is logged.
        """
        if self._thread is None:
            self._close_here()
        elif not self._is_closed:
            self._close_thread(self._thread, error)

    def close_news(self) -> None:
        """Close what tells a reader in an event loop of fragments. In that loop, once closed."""
        if self._news is not None and not self.run.counters.caller.is_waiting:
            self._news.close()

    def _take(self) -> Any:
        if self._stalled is not None:
            raise self._stalled
        counters = self.run.counters
        fragments = self._fragments  # which `close` may replace
        fragment = fragments[0] if fragments else None
        if fragment is None:
            if self.run.has_ended:
                counters.end()
            if self._errors:
                raise self._errors.pop()
            return None
        if counters.ended_at is None:  # by `close`, in another thread
            counters.caller.begin_life()
        fragments.popleft()
        counters.caller.items += 1
        return fragment

    def _await(self) -> None:
        """Wait until there is a fragment, or no more come."""
        if self._thread is not None:
            while not self._fragments:
                self._arrived.wait(INTERRUPT_S)
                self._arrived.clear()
            return
        try:
            if not self._fragments and not self._is_closed:
                self._fragments.extend(fragment for _, fragment in self._drive(self.run.next_outputs))
        finally:
            if self._is_left:
                self._end()

    def _command(self, command: Callable[[], None]) -> None:
        """Have a function called in the ring's thread."""
        if self._thread is None:
            command()
        elif not self._is_closed:
            self._commands.append(command)
            self.run.bell.ring()

    # In the reader's thread

    def _drive(self, function: Callable[[], T]) -> T:
        """Call a function of the run. Raises the StallError that ends it."""
        self._driving = get_ident()
        try:
            try:
                result = function()
            finally:
                with self._breaking:
                    self._driving = 0
        except (Exception, KeyboardInterrupt) as error:
            if self._stalled is None:
                raise
            self._driving = 0
            raise self._stalled from None if isinstance(error, KeyboardInterrupt) else error
        if self._stalled is not None:
            raise self._stalled
        return result

    def _close_here(self) -> None:
        self._is_closed = True
        self.run.interrupt()
        limit = backoff.times.close_s
        self._is_left = not self._at_work.acquire(timeout=limit)
        if self._is_left and not self._at_work.acquire(blocking=False):
            logger.warning(
                "the rollout is left to the thread of its loop: an environment or the module hangs after %.1f s",
                limit,
            )
            return
        try:
            self._end()
        finally:
            self._at_work.release()

    def _end(self) -> None:
        self.run.counters.end()
        self.run.close()
        self._fragments.clear()

    # In a thread of the ring's own

    def _work(self) -> None:
        try:
            with self.run as run:
                self._go_on(run)
        except BaseException as error:
            self._errors.append(error)
        self._has_stopped.set()
        self._put(None)

    def _go_on(self, run: InlineRun) -> None:
        """Make fragments until the driver is closed, or no more come."""
        try:
            while not (self._is_closed or run.has_ended):
                while self._commands:
                    self._commands.popleft()()
                for _, fragment in run.next_outputs():
                    self._put(fragment)
                    del fragment  # which this frame would hold, in the traceback of an error
        finally:
            self._has_stopped.set()

    def _put(self, fragment: Any) -> None:
        if not self._fragments:
            self._put_at = clock()
        self._fragments.append(fragment)
        self._arrived.set()
        if self._news is not None:
            self._news.ring()

    def _close_thread(self, thread: threading.Thread, error: BaseException | None) -> None:
        self._is_closed, began = True, monotonic()
        self.run.counters.end()
        self.run.interrupt()
        if self._has_stopped.wait(backoff.times.close_s):
            thread.join(_NODES_CLOSE_S)
        if thread.is_alive():
            self._put(None)  # a reader that waits waits no more
            what = "a node has not closed" if self._has_stopped.is_set() else "an environment or the module hangs"
            logger.warning("the rollout's thread is left behind: %s after %.1f s", what, monotonic() - began)
            return
        self._fragments = deque([None])
        if error is None and self._errors:
            raise self._errors.pop()
        self._errors.clear()


class RolloutDoctor(Doctor):
    """Watches a rollout's ring, its learner pipeline and its reader.

    drive       runs the ring
    learner     meter of the learner pipeline
    signs       method that gives silent faults; held weakly
    """

    def __init__(
        self, drive: Driver, learner: NodeMeter, signs: Callable[[], Sequence[Sign]], *of_every_doctor: Any
    ) -> None:
        super().__init__(drive.run.counters, *of_every_doctor)
        self._drive, self._learner, self._signs = drive, learner, WeakMethod(signs)
        self._counters.learner, self._counters.reader = learner, get_ident()
        self._learnt = 0  # busy time of the learner pipeline when the reader got its round
        self._told: list[FragmentName] = []  # of the round, for a trace

    def stop(self) -> None:
        self._end_update()
        super().stop()

    def reader_asks(self) -> None:
        """Take note that the reader asks for the next round, in its thread."""
        counters = self._counters
        if counters.given is not None:
            counters.reader_times.add(clock() - counters.given - (self._learner.busy_ns - self._learnt))
        counters.reader = get_ident()
        self._end_update()

    def reader_gets(self, fragments: Iterable[Any]) -> None:
        """Take note that the reader gets a round of these fragments."""
        told = () if self.traced is None else fragments
        self._told = [(fragment.lane, fragment.sequence) for fragment in told]
        self._counters.given, self._learnt = clock(), self._learner.busy_ns

    def look(self) -> Look | None:
        return None if self.is_over else self._drive.look()

    def signs(self) -> Sequence[Sign]:
        signs = self._signs()
        return () if signs is None else signs()

    def end_stalled(self, error: StallError) -> None:
        self._drive.end_stalled(error)

    def _end_update(self) -> None:
        """Record what the reader did with its last round, once the learner pipeline had made a batch of it."""
        given, self._counters.given, trace = self._counters.given, None, self.traced
        if given is not None and self._told and trace is not None:
            trace.update(self._told, given + self._learner.busy_ns - self._learnt, clock())
