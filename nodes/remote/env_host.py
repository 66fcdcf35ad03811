"""Environments on this host, for a rollout on another."""

import ssl
from collections.abc import Callable
from functools import partial
from typing import Any

from rollflow.nodes.env_source import EnvSource, lane_makers
from rollflow.nodes.multi_agent.agent_environments import AgentEnvSource
from rollflow.nodes.multi_agent.array_vector import MultiAgentVectorEnv
from rollflow.nodes.multi_agent.remote.agent_host_lane import AgentHostLane, agent_lanes
from rollflow.nodes.multi_agent.several import first_made, with_first
from rollflow.nodes.remote.host import Host
from rollflow.nodes.remote.host_lane import HostLane
from rollflow.nodes.remote.lane_threads import all_made
from rollflow.nodes.remote.remote_envs import Secret
from rollflow.stream.wire import Answer, Limits

Lanes = list[HostLane] | list[AgentHostLane]


class EnvHost(Host):
    """Environments for a rollout on another host.

        env, num_envs, lanes    as for `Rollout`, or for `MultiAgentRollout`; lanes overlap: while one's actions are on
                                their way, others step
        secret                  the gateway's; None: it has none
        tls                     a context, of a client to `connect` and of a server to `listen`
        name                    what it is called in the gateway's messages; None: the machine's name
        limits                  of frames, times and bytes under way

    role    "agents" where an environment has several agents, else "env"

    Every lane has a thread of its own. Leave it by `with`, or `close` it: this ends the threads and closes the
    environments.

    Raises EnvError where environments can't be made, or lanes differ.
    """

    def __init__(
        self,
        env: EnvSource | AgentEnvSource,
        *,
        num_envs: int | None = None,
        lanes: int | None = None,
        secret: Secret = None,
        tls: ssl.SSLContext | None = None,
        name: str | None = None,
        limits: Limits | None = None,
    ) -> None:
        made = _lanes_of(env, num_envs, lanes)
        self.role = "agents" if isinstance(made[0], AgentHostLane) else "env"
        metadata = {"env": env} if isinstance(env, str) else {}
        super().__init__(made, secret=secret, tls=tls, name=name, limits=limits, metadata=metadata)

    def _work_on(self, lane: HostLane | AgentHostLane, request: Any) -> Callable[[], Answer]:
        return partial(lane.answer, request)


def _lanes_of(env: Any, num_envs: int | None, lanes: int | None) -> Lanes:
    """Lanes of environments with one agent each, or of such with several: the first that is made tells."""
    if isinstance(env, MultiAgentVectorEnv):
        return agent_lanes(env, num_envs, lanes, are_vectors=True)
    first = first_made(env)
    if first is None:
        return all_made(HostLane(maker) for maker in lane_makers(env, num_envs, lanes))
    with first:
        if first.has_several:
            return agent_lanes(with_first(env, first), num_envs, lanes, are_vectors=first.is_vector)
        return all_made(HostLane(maker) for maker in lane_makers(with_first(env, first), num_envs, lanes))
