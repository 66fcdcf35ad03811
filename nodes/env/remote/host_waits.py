"""Waits for hosts, in words for the stall doctor, as far as they are known here."""

from time import monotonic

from rollflow.nodes.env.remote.remote_host import RemoteLane
from rollflow.nodes.env.workers.watch import DOING, Activity, ProgressMark, calls_of
from rollflow.stream.observe.waits import Wait


def wait_for(remote: RemoteLane, name: str, progress: ProgressMark, began: float | None) -> Wait:
    """The wait of the node `name` for one lane on a host, as far as it is known here.

    progress    the count by which the lane shows that it gets on, and its activity
    began       when it was asked for what it is at, on the clock `monotonic`; None: it was not asked yet
    """
    host, (turns, activity) = remote.host, progress
    where = f"lane {remote.status.index}, host {host.name}"
    if host.lost_at is not None:
        age_s = max(0.0, monotonic() - host.lost_at)
        return Wait(name, "away", "has lost the connection to its host", mark=host.lost_at, age_s=age_s, where=where)
    return Wait(
        name,
        "call",
        f"has no answer to {DOING[activity].removeprefix('is in ')}",
        mark=(began, turns),
        age_s=0.0 if began is None else max(0.0, monotonic() - began),
        calls=calls_of(remote.lane, turns, activity),
        where=where,
        limit=None if activity is Activity.STEP else "reset",
        remedy="look at the log of the host, or run rollflow doctor PID there; step_timeout gives the lane up",
    )
