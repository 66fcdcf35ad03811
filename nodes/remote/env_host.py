"""Environments on this host, for a rollout on another."""

import ssl
from collections.abc import Callable
from functools import partial
from typing import Any

from rollflow.nodes.env_source import EnvSource, lane_makers
from rollflow.nodes.remote.host import Host
from rollflow.nodes.remote.host_lane import HostLane
from rollflow.nodes.remote.remote_envs import Secret
from rollflow.stream.wire import Answer, Limits


class EnvHost(Host):
    """Environments for a rollout on another host.

        env, num_envs, lanes    as for `Rollout`; lanes overlap: while one's actions are on their way, others step
        secret                  the gateway's; None: it has none
        tls                     a context, of a client to `connect` and of a server to `listen`
        name                    what it is called in the gateway's messages; None: the machine's name
        limits                  of frames, times and bytes under way

    Every lane has a thread of its own. Leave it by `with`, or `close` it: this ends the threads and closes the
    environments.

    Raises EnvError where environments can't be made, or lanes differ.
    """

    role = "env"

    def __init__(
        self,
        env: EnvSource,
        *,
        num_envs: int | None = None,
        lanes: int | None = None,
        secret: Secret = None,
        tls: ssl.SSLContext | None = None,
        name: str | None = None,
        limits: Limits | None = None,
    ) -> None:
        made = [HostLane(maker) for maker in lane_makers(env, num_envs, lanes)]
        metadata = {"env": env} if isinstance(env, str) else {}
        super().__init__(made, secret=secret, tls=tls, name=name, limits=limits, metadata=metadata)

    def _work_on(self, lane: HostLane, request: Any) -> Callable[[], Answer]:
        return partial(lane.answer, request)
