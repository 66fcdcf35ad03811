"""Redialler of one address: it waits for each connection, and logs how long one is awaited."""

import logging
import select
import socket
from collections.abc import Callable
from time import monotonic

from rollflow.stream.data.errors import WireError
from rollflow.stream.graph.wakeup import Wakeup
from rollflow.stream.net.backoff import Reminder
from rollflow.stream.net.dial import REACH_S
from rollflow.stream.net.dialler import Dialler
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
        self._name = f"{role} {address}"
        self._retry_s, self._wakeup, self._is_over = retry_s, wakeup, is_over
        self._poll = select.poll()
        self._poll.register(wakeup.fileno(), select.POLLIN)
        self._dialler = Dialler([address], self._poll, longest_pause_s)
        [self._dialled] = self._dialler.all
        self._problem = f"{self._name}: no answer yet"
        self._logged: set[str] = set()  # problems, since it was connected last
        self._is_reached = self._is_connected = self._has_been_connected = self._has_warned = False
        self.begin()

    def begin(self) -> None:
        """Count the time from now on."""
        self._reminder = Reminder(monotonic())

    def reach(self) -> socket.socket:
        """Non-blocking socket that is connected, once the pause after the last attempt is over.

        Raises OSError where the attempt fails, InterruptedError where it is over.
        """
        failures, begun = self._dialled.failures, monotonic()
        while not self._is_over():
            self._dialler.tick(monotonic())
            if self._dialled.failures > failures:
                raise OSError(self._dialled.problem)
            due = self._dialler.due
            if due is None and self.is_given_up and monotonic() >= begun + REACH_S:
                raise TimeoutError(self._dialled.problem)  # no name server has answered
            self._remind()
            left_s = _LOOK_S if due is None else min(_LOOK_S, max(0.0, due - monotonic()))
            for fd, _ in self._poll.poll(left_s * 1e3):
                if fd in self._dialler and (reached := self._dialler.serve(fd, monotonic())) is not None:
                    self._is_reached = True
                    return reached[0]
            self._wakeup.silence()
        self._dialler.close()
        raise InterruptedError("given up before there was an answer")

    def connected(self) -> None:
        """Note that the other end has taken this one in."""
        if self._has_warned or self._has_been_connected:
            again = " again" if self._has_been_connected else ""
            waited = "" if self._is_connected else f" after {monotonic() - self._reminder.since:.1f} s"
            logger.warning("%s: connected%s%s", self._name, again, waited)
        self._is_connected = self._has_been_connected = True
        self._has_warned = False
        self._dialler.welcomed(self._dialled)
        self._logged.clear()

    def failed(self, problem: str) -> None:
        """Note why there is no connection, and log it where that is new, or due again."""
        if self._is_reached:
            self._is_reached = False
            self._dialler.lost(self._dialled)
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
