"""What looks at a run have seen of it in the last hour."""

from collections import deque
from collections.abc import Mapping
from typing import Any

HOUR_S = 3600.0

_FIGURES = {"return": "rollout/ep_rew_mean", "version": "policy/version", "lag": "policy/lag"}  # name -> figure

Points = deque[tuple[float, float]]


class RunHistory:
    """The last hour of one run.

    figures    name -> its values, each as (time in seconds, value)
    busy       stage -> its busy share since the look before, each as (time, share)
    calls      party -> calls that looks found it in, each as (begin, end); one that goes on grows
    """

    def __init__(self) -> None:
        self.figures: dict[str, Points] = {}
        self.busy: dict[str, Points] = {}
        self.calls: dict[str, Points] = {}

    def add(self, run: Mapping[str, Any], now: float) -> None:
        """Add a snapshot with rates, and forget what is more than an hour old.

        now    time of the look, in seconds of any clock that only goes on
        """
        given = run.get("figures", {})
        values = {"steps/s": run["steps_per_s"], **{name: given.get(figure) for name, figure in _FIGURES.items()}}
        for name, value in values.items():
            if value is not None:
                self.figures.setdefault(name, deque()).append((now, value))
        for stage, node in run["nodes"].items():
            self.busy.setdefault(stage, deque()).append((now, node["busy"]))
        for party in run.get("parties", ()):
            if party["kind"] != "waits":
                self._extend(self.calls.setdefault(party["name"], deque()), now - party["age_s"], now)
        self.figures = _since(self.figures, now - HOUR_S, 0)
        self.busy = _since(self.busy, now - HOUR_S, 0)
        self.calls = _since(self.calls, now - HOUR_S, 1)

    @staticmethod
    def _extend(calls: Points, begin: float, end: float) -> None:
        if calls and begin <= calls[-1][1]:  # the call that the look before has seen
            begin = min(begin, calls.pop()[0])
        calls.append((begin, end))


def _since(series: dict[str, Points], begin: float, at: int) -> dict[str, Points]:
    """The series without what has its time, which stands in each point at that place, before `begin`."""
    for points in series.values():
        while points and points[0][at] < begin:
            points.popleft()
    return {name: points for name, points in series.items() if points}
