"""Wait for the other end at an address that is dialled: how long it may take, and what the log says of it."""

import logging
from collections.abc import Sequence
from time import monotonic

from rollflow.stream.data.errors import WireError
from rollflow.stream.net import backoff
from rollflow.stream.net.backoff import WaitReminder
from rollflow.stream.wire import Address

logger = logging.getLogger(__name__)


class DialWait:
    """Wait for an end that a `Dialler` dials again and again.

    role       what is dialled, such as "gateway"
    retry_s    seconds without a connection after which it is given up; None: it never is
    """

    def __init__(self, role: str, address: Address, retry_s: float | None) -> None:
        self._role, self._name = role, f"{role} {address}"
        self._retry_s = retry_s
        self._problem = f"{self._name}: no answer yet"
        self._logged: set[str] = set()  # problems, since it was connected last
        self._is_connected = self._has_been_connected = self._has_warned = self._has_failed = False
        self.begin()

    def begin(self) -> None:
        """Count the time from now on."""
        self._attempt_began = monotonic()
        self._wait = WaitReminder(self._retry_s)

    def connected(self) -> None:
        """Note that the other end has taken this one in."""
        if self._has_warned or self._has_been_connected:
            again = " again" if self._has_been_connected else ""
            waited = "" if self._is_connected else f" after {self._wait.waited_s:.1f} s"
            logger.warning("%s: connected%s%s", self._name, again, waited)
        self._is_connected = self._has_been_connected = True
        self._has_warned = False
        self._logged.clear()

    def failed(self, problem: str) -> None:
        """Note why there is no connection, and log it if that is new, or due again."""
        self._has_failed, self._attempt_began = True, monotonic()
        if self._is_connected:
            self._is_connected = False
            self.begin()
        if self._is_given_up and self._logged:
            return  # an attempt that was cut short says less than those before it
        self._problem = problem
        if problem in self._logged:
            self._remind()
            return
        self._logged.add(problem)
        self._has_warned = True
        logger.warning("waiting: %s; %s", problem, self._prospect())

    def check(self, problems: Sequence[str], *, gives_up: bool = True) -> None:
        """Log that the connection is awaited, if that is due. Raises WireError if it is given up.

        problems    that a dialler tells of, if nothing has failed yet
        gives_up    False while there is a reason to wait longer, such as a handshake that is going on
        """
        if self._is_connected:
            return  # the connection has come to an orderly end, and nothing has failed since
        if problems and not self._logged:
            self._problem = f"{self._role} {problems[0]}"
        has_tried = self._has_failed or monotonic() >= self._attempt_began + backoff.times.reach_s
        self._has_failed = False
        if gives_up and has_tried and self._is_given_up:
            problem = self._problem.removeprefix(f"{self._name}: ")
            topic = "trainer away" if self._name.startswith("trainer ") else "hosts"
            raise WireError(f"{self._name} not reached for {self._retry_s:g} s: {problem}", "lost").see(topic)
        self._remind()

    @property
    def due(self) -> float | None:
        """Time at which `check` is to be called; None: it need not be."""
        if self._is_connected:
            return None
        return monotonic() + (backoff.times.look_s if self._is_given_up else min(backoff.times.look_s, self._wait.left))

    @property
    def _is_given_up(self) -> bool:
        """True if it has been dialled in vain for `retry_s` seconds."""
        return not self._is_connected and self._wait.is_over

    def _remind(self) -> None:
        """Log that the connection is awaited, if that is due."""
        if self._wait.is_long:
            self._has_warned = True
            logger.warning("waiting for %.0f s: %s; %s", self._wait.waited_s, self._problem, self._prospect())

    def _prospect(self) -> str:
        if self._retry_s is None:
            return "it is dialled again until it answers"
        return f"it is dialled again for {self._wait.left_s:.0f} s more (retry_s, or --retry)"
