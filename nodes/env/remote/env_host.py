"""`EnvHost`: environments on this host, for a rollout on another."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rollflow.nodes.argument_checks import checking_keywords
from rollflow.nodes.env.env_source import Autoreset, EnvSource, with_kwargs
from rollflow.nodes.env.environments import AgentEnvSource
from rollflow.nodes.env.observation_check import Deviations
from rollflow.nodes.env.remote.host import PLACES, Host
from rollflow.nodes.env.remote.host_lane import HostLane, made_lanes
from rollflow.stream.wire import Answer


class EnvHost(Host):
    """Environments for a rollout on another host.

        env, num_envs, lanes    as for `Rollout`, or for `MultiAgentRollout`; lanes overlap: while one's actions are on
                                their way, others step
        env_kwargs              as for `Rollout`
        autoreset_mode          as for `Rollout`; not for environments with several agents
        name                    what it is called in the gateway's messages; it takes the place of a lost host of that
                                name at once; None: the machine's name and this process' number

    role    "agents" where an environment has several agents, else "env"

    Every lane has a thread of its own. Leave it by `with`, or `close` it: this ends the threads and closes the
    environments.

    Raises EnvError where environments can't be made, or lanes differ.
    """

    @checking_keywords("EnvHost", PLACES)
    def __init__(
        self,
        env: EnvSource | AgentEnvSource,
        *,
        env_kwargs: Mapping[str, Any] | None = None,
        num_envs: int | None = None,
        lanes: int | None = None,
        autoreset_mode: Autoreset = None,
        name: str | None = None,
    ) -> None:
        deviations = Deviations()
        made, has_several = made_lanes(
            with_kwargs(env, env_kwargs),
            num_envs,
            lanes,
            autoreset_mode,
            lambda maker, index: HostLane(maker, index, deviations),
        )
        self.role = "agents" if has_several else "env"
        metadata = {"env": env} if isinstance(env, str) else {}
        super().__init__(made, name=name, metadata=metadata)

    def _work_on(self, lane: HostLane, request: Any) -> Callable[[], Answer]:
        return partial(lane.answer, request)
