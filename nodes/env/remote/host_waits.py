"""Waits for hosts, in words for the stall doctor: as far as they are known here, and as hosts say when asked."""

from dataclasses import replace
from time import monotonic

from rollflow.nodes.env.remote.gateway import Gateway
from rollflow.nodes.env.remote.remote_host import RemoteLane
from rollflow.nodes.env.workers.watch import DOING, Activity, ProgressMark, calls_of
from rollflow.stream.doctor.waits import Wait
from rollflow.stream.net.inspections import heard


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
        remedy="look at the log of the host; step_timeout gives the lane up",
    )


def asking(wait: Wait, remote: RemoteLane, gateway: Gateway) -> Wait:
    """The wait for a lane whose host is there, which can ask the host what the lane is at."""
    if wait.kind != "call":
        return wait
    return replace(wait, ask=lambda: _as_the_host_says(wait, remote.status.index, gateway))


def _as_the_host_says(wait: Wait, lane: int, gateway: Gateway) -> Wait:
    try:
        standing = gateway.inspect(lane)
    except TimeoutError:
        remedy = "look whether the host's process runs, and at the network; step_timeout gives the lane up"
        return replace(wait, doing=f"{wait.doing}, and its host does not answer at all", remedy=remedy)
    if standing is None:
        return wait
    doing, stack = heard(standing)
    remedy = "have it return; step_timeout gives the lane up, which begins anew"
    return replace(wait, doing=doing, remedy=remedy, stack=lambda: stack)
