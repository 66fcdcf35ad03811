"""Redialler of one address: it waits for each connection, and logs how long one is awaited."""

import logging
import select
import socket
from collections.abc import Callable
from time import monotonic

from rollflow.stream.data.errors import WireError
from rollflow.stream.graph.wakeup import Wakeup
from rollflow.stream.net.backoff import Reminder, pause_s
from rollflow.stream.net.dial import REACH_S, DialTarget, Lookup, check_connected, dial, targets_at_hand
from rollflow.stream.wire import Address

logger = logging.getLogger(__name__)

_LOOK_S = 1.0  # between two looks at whether anybody waits still


class Redialler:
    """Dials one address again and again, with pauses that double, in the thread that calls.

    role               what is dialled, such as "gateway"
    retry_s            seconds without a connection after which it is given up; None: it never is
    longest_pause_s    between two attempts
    wakeup, is_over    ends a wait, after which it is asked whether nobody wants a connection any more
    """

    def __init__(
        self,
        role: str,
        address: Address,
        *,
        retry_s: float | None,
        longest_pause_s: float,
        wakeup: Wakeup,
        is_over: Callable[[], bool],
    ) -> None:
        self.address = address
        self._name = f"{role} {address}"
        self._retry_s, self._longest_pause_s = retry_s, longest_pause_s
        self._wakeup, self._is_over = wakeup, is_over
        self._problem = f"{self._name}: no answer yet"
        self._logged: set[str] = set()  # problems, since it was connected last
        self._is_connected = self._has_been_connected = self._has_warned = False
        self._failures = 0  # in a row
        self.begin()

    def begin(self) -> None:
        """Count the time from now on."""
        self._reminder = Reminder(monotonic())

    def reach(self) -> socket.socket:
        """Non-blocking socket that is connected; each attempt takes another of a name's targets.

        Raises OSError where that fails, InterruptedError where it is over.
        """
        targets = targets_at_hand(self.address) or self._looked_up()
        sock = dial(targets[self._failures % len(targets)])
        try:
            if not self._has_event(sock.fileno(), select.POLLOUT, monotonic() + REACH_S):
                raise TimeoutError(f"no answer within {REACH_S:g} s")
            check_connected(sock)
        except BaseException:
            sock.close()
            raise
        return sock

    def connected(self) -> None:
        """Note that the other end has taken this one in."""
        if self._has_warned or self._has_been_connected:
            again = " again" if self._has_been_connected else ""
            waited = "" if self._is_connected else f" after {monotonic() - self._reminder.since:.1f} s"
            logger.warning("%s: connected%s%s", self._name, again, waited)
        self._is_connected = self._has_been_connected = True
        self._has_warned = False
        self._failures = 0
        self._logged.clear()

    def failed(self, problem: str) -> None:
        """Note why there is no connection, and log it where that is new, or due again."""
        if self._is_connected:
            self._is_connected = False
            self.begin()
        if self.is_given_up and self._logged:
            return  # an attempt that was cut short says less than those before it
        self._problem = problem
        if problem in self._logged:
            self._remind()
            return
        self._logged.add(problem)
        self._has_warned = True
        logger.warning("waiting: %s; %s", problem, self._prospect())

    @property
    def is_given_up(self) -> bool:
        """True where it has been dialled in vain for `retry_s` seconds."""
        return self._until is not None and monotonic() >= self._until

    def error(self) -> WireError:
        """The error of an address that was given up."""
        problem = self._problem.removeprefix(f"{self._name}: ")
        topic = "trainer away" if self._name.startswith("trainer ") else "hosts"
        return WireError(f"{self._name} not reached for {self._retry_s:g} s: {problem}", "lost").see(topic)

    def pause(self) -> None:
        """Wait before the next attempt."""
        self._failures += 1
        until = monotonic() + pause_s(self._failures, self._longest_pause_s)
        poll = select.poll()
        poll.register(self._wakeup.fileno(), select.POLLIN)
        while not self._is_over() and (left_s := until - monotonic()) > 0:
            poll.poll(min(left_s, _LOOK_S) * 1e3)
            self._wakeup.silence()

    def _looked_up(self) -> list[DialTarget]:
        """Targets of a name. Raises OSError where it is not looked up before it is given up, or within `REACH_S`."""
        lookup: Lookup[None] = Lookup()
        thread = lookup.ask(None, self.address)
        latest = None if self._until is None else max(self._until, monotonic() + REACH_S)
        if not self._has_event(lookup.fileno(), select.POLLIN, latest):
            raise TimeoutError("no name server has said where this is")
        thread.join()
        [(_, found)] = lookup.answers()
        if isinstance(found, OSError):
            raise found
        return found

    def _has_event(self, fd: int, event: int, until: float | None) -> bool:
        """True once a descriptor has an event, False after `until`. Raises InterruptedError where it is over."""
        poll = select.poll()
        poll.register(fd, event)
        poll.register(self._wakeup.fileno(), select.POLLIN)
        while True:
            left_s = _LOOK_S if until is None else min(_LOOK_S, max(0.0, until - monotonic()))
            if fd in {ready for ready, _ in poll.poll(left_s * 1e3)}:
                return True
            self._wakeup.silence()
            if self._is_over():
                raise InterruptedError("given up before there was an answer")
            self._remind()
            if until is not None and monotonic() >= until:
                return False

    @property
    def _until(self) -> float | None:
        """Time at which it is given up; None: never, or it is connected."""
        if self._retry_s is None or self._is_connected:
            return None
        return self._reminder.since + self._retry_s

    def _remind(self) -> None:
        """Log that the connection is awaited, where that is due."""
        now = monotonic()
        if self._reminder.is_due(now):
            self._has_warned = True
            waited_s = now - self._reminder.since
            logger.warning("waiting for %.0f s: %s; %s", waited_s, self._problem, self._prospect())

    def _prospect(self) -> str:
        if self._until is None:
            return "it is dialled again until it answers"
        return f"it is dialled again for {max(0.0, self._until - monotonic()):.0f} s more (retry_s)"
