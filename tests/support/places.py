"""Where a rollout runs, by name."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from remote_hosts import hosting, listening

from rollflow import Forward, RemoteEnvs, RemoteRollouts, Rollout
from rollflow.nodes import RolloutHost

PLACES: dict[str, dict[str, Any]] = {
    "inline": {},
    "ahead": {"prefetch": 1},
    "threads": {"where": "threads"},
    "threads apart": {"where": "threads", "forward": Forward(max_batch=64)},
    "processes": {"where": "processes", "workers": 1},
    "processes apart": {"where": "processes", "workers": 1, "forward": Forward(max_batch=64)},
    "rollouts": {"where": "rollouts", "workers": 1},
}


@contextmanager
def rollout_at(
    place: str,
    makers: Any,
    *,
    kind: Any = Rollout,
    envs: dict[str, Any] | None = None,
    acts: dict[str, Any] | None = None,
    hosts: dict[str, Any] | None = None,
    **options: Any,
) -> Iterator[Any]:
    """A rollout that has not begun, over environments in one of `PLACES`, or on a host in a thread.

    Places of hosts are "hosts", which have environments, and "hosted rollouts".

    kind     `Rollout` or `MultiAgentRollout`
    envs     options of environments, which a host has instead
    acts     module and connectors for acting, which a host of whole rollouts has as well
    hosts    further options of a host
    """
    envs, acts = envs or {}, acts or {}
    if place not in ("hosts", "hosted rollouts"):
        yield kind(makers, **{**PLACES[place], **envs, **acts, **options})
        return
    hosted: dict[str, Any] = {"kind": RolloutHost, **acts} if place == "hosted rollouts" else {}
    remote = listening(RemoteRollouts if hosted else RemoteEnvs)
    with hosting(remote.addresses[0], makers, **envs, **hosted, **(hosts or {})):
        yield kind(remote, **acts, **options)
