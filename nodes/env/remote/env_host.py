"""`EnvHost`: environments on this host, for a rollout on another."""

import ssl
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rollflow.nodes.env.env_source import Autoreset, EnvSource, LaneMaker, lane_makers, with_kwargs
from rollflow.nodes.env.multi_agent.agent_environments import AgentEnvSource
from rollflow.nodes.env.multi_agent.array_vector import MultiAgentVectorEnv
from rollflow.nodes.env.multi_agent.lane_envs import first_made, with_first
from rollflow.nodes.env.observation_check import Deviations
from rollflow.nodes.env.remote.host import Host
from rollflow.nodes.env.remote.host_lane import AgentHostLane, HostLane, agent_lanes, all_made
from rollflow.nodes.env.remote.remote_envs import Secret
from rollflow.stream.data.errors import EnvError
from rollflow.stream.wire import Answer, Limits

Lanes = list[HostLane] | list[AgentHostLane]


class EnvHost(Host):
    """Environments for a rollout on another host.

        env, num_envs, lanes    as for `Rollout`, or for `MultiAgentRollout`; lanes overlap: while one's actions are on
                                their way, others step
        env_kwargs              as for `Rollout`
        autoreset_mode          as for `Rollout`; not for environments with several agents
        secret                  the gateway's; None: it has none
        tls                     a context, of a client to `connect` and of a server to `listen`
        name                    what it is called in the gateway's messages; it takes the place of a lost host of that
                                name at once; None: the machine's name and this process' number
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
        env_kwargs: Mapping[str, Any] | None = None,
        num_envs: int | None = None,
        lanes: int | None = None,
        autoreset_mode: Autoreset = None,
        secret: Secret = None,
        tls: ssl.SSLContext | None = None,
        name: str | None = None,
        limits: Limits | None = None,
    ) -> None:
        made = _lanes_of(with_kwargs(env, env_kwargs), num_envs, lanes, autoreset_mode)
        self.role = "agents" if isinstance(made[0], AgentHostLane) else "env"
        metadata = {"env": env} if isinstance(env, str) else {}
        super().__init__(made, secret=secret, tls=tls, name=name, limits=limits, metadata=metadata)

    def _work_on(self, lane: HostLane | AgentHostLane, request: Any) -> Callable[[], Answer]:
        return partial(lane.answer, request)


def _lanes_of(env: Any, num_envs: int | None, lanes: int | None, autoreset_mode: Autoreset) -> Lanes:
    """Lanes of environments with one agent each, or with several, as the first one that is made has."""
    if isinstance(env, MultiAgentVectorEnv):
        _check_no_mode(autoreset_mode)
        return agent_lanes(env, num_envs, lanes, None)
    first = first_made(env)
    if first is None:
        return _single_agent_lanes(lane_makers(env, num_envs, lanes, autoreset_mode))
    with first:
        if first.has_several:
            _check_no_mode(autoreset_mode)
            return agent_lanes(env, num_envs, lanes, first)
        return _single_agent_lanes(lane_makers(with_first(env, first), num_envs, lanes, autoreset_mode))


def _check_no_mode(autoreset_mode: Autoreset) -> None:
    if autoreset_mode is not None:
        raise EnvError(
            f"autoreset_mode is {autoreset_mode!r}, but these environments have several agents; expected it to be left "
            "out"
        )


def _single_agent_lanes(makers: Sequence[LaneMaker]) -> list[HostLane]:
    """Lanes of environments with one agent each."""
    deviations = Deviations()
    return all_made(HostLane(maker, index, deviations) for index, maker in enumerate(makers))
