"""Scaling of hosts: how many there are to be, by the share of the time that those that are here are at work."""

import math
from typing import NamedTuple

from rollflow.nodes.argument_checks import check_numbers

WINDOW_S = 5.0
_SATURATED, _IDLE = 0.9, 0.6  # shares from which on there are to be more, and fewer
_AIMED = 0.8  # share that fewer hosts would come to
_GROWTH = 1.5  # at once, at most: a host that was wanted from 0.9 on is at work for 0.6 then, and so not idle
_GROWS_AFTER, _SHRINKS_AFTER = 2, 3  # windows in a row that say the same


class HostRange(NamedTuple):
    """Number of hosts at first, and its bounds."""

    first: int
    least: int
    most: int

    @classmethod
    def of(cls, num_hosts: int | None, min_hosts: int | None, max_hosts: int | None) -> "HostRange":
        """The range that a place was given; None: nothing was. Raises ValueError where it is none."""
        check_numbers(num_hosts=(num_hosts, 1), min_hosts=(min_hosts, 1), max_hosts=(max_hosts, 1))
        first = num_hosts or min_hosts or 1
        made = cls(first, min_hosts or first, max_hosts or first)
        if not made.least <= first <= made.most:
            raise ValueError(
                f"num_hosts is {num_hosts}, min_hosts is {min_hosts} and max_hosts is {max_hosts}, expected "
                "min_hosts <= num_hosts <= max_hosts"
            )
        return made

    @property
    def is_wide(self) -> bool:
        """True where the number may change."""
        return self.least < self.most


class Decision(NamedTuple):
    """Number of hosts that there are to be from now on, and why."""

    num_hosts: int
    reason: str


def wanted(busy: float, here: int, started: int, hosts: HostRange) -> int:
    """Number of hosts for the share of a window in which those that are here were at work.

    busy     0.0 to 1.0
    here     hosts that take part; the others of those that were `started` are yet to come
    hosts    bounds

    Hosts that are always at work hold the run back: there are to be more, once all are here. Hosts that wait are held
    back by whoever takes their fragments: there are to be fewer.
    """
    if busy >= _SATURATED and here >= started:
        return min(hosts.most, math.ceil(started * _GROWTH))
    if busy <= _IDLE:
        return max(hosts.least, min(started, math.ceil(here * busy / _AIMED)))
    return started


class HostScaler:
    """Decides how many hosts there are to be, from looks at them, one window of looks after the other.

    hosts    bounds
    """

    def __init__(self, hosts: HostRange) -> None:
        self._hosts = hosts
        self._began: float | None = None
        self._looks: list[float] = []
        self._agreed = 0  # windows in a row that want more (above 0) or fewer (below 0)

    def look(self, now: float, busy: float | None, here: int, started: int) -> Decision | None:
        """Take a look, at a time in seconds; the decision, where it ends a window that leads to one.

        busy    share of the hosts that are at work right now; None: nobody is there to be, and the windows begin anew;
                for the rest see `wanted`
        """
        if busy is None:
            self._began, self._looks, self._agreed = None, [], 0
            return None
        self._began = now if self._began is None else self._began
        self._looks.append(busy)
        took_s = now - self._began
        if took_s < WINDOW_S:
            return None
        share = sum(self._looks) / len(self._looks)
        self._began, self._looks = now, []
        number = wanted(share, here, started, self._hosts)
        change = (number > started) - (number < started)
        self._agreed = change + (self._agreed if change * self._agreed > 0 else 0)
        if not -_SHRINKS_AFTER < self._agreed < _GROWS_AFTER:
            self._agreed = 0
            who = "they hold the run back" if change > 0 else "whoever takes their fragments holds the run back"
            return Decision(number, f"in the last {took_s:.1f} s hosts were at work for {share:.0%} of the time: {who}")
        return None
