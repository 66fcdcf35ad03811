"""Hosts of either kind that come and go under one rollout, of one agent or several."""

from functools import partial
from typing import Any

from feeding_rollouts import agents_rollout_over, module_of, modules_of_agents, weights, weights_of_agents
from numbered_agents import NumberedAgents
from remote_hosts import HostProcess, hosting, listening
from remote_rollouts import HASTY, makers, rollout_over, rollouts_on

from rollflow import RemoteEnvs, RemoteRollouts
from rollflow.nodes import RolloutHost
from rollflow.nodes.env.remote.host import Host
from rollflow.stream.wire import Limits


class PacedHosts:
    """Place where hosts come in, and those hosts.

    kind      of the hosts
    agents    that act in each step of an environment; 0: each has one, which is not told by its name
    hosts     that the rollout waits for
    limits    of their connections; by default a host that is away for half a second is lost
    """

    def __init__(self, kind: type[Host], agents: int = 0, hosts: int = 1, limits: Limits = HASTY) -> None:
        self.kind, self.agents = kind, agents
        self.options: dict[str, Any] = {"agents": agents, "nested": 1, "at_once": True} if agents else {}
        place = RemoteRollouts if kind is RolloutHost else RemoteEnvs
        self.envs: Any = listening(place, limits=limits, hosts=hosts)
        self.address = self.envs.addresses[0]

    def rollout(self, **options: Any) -> Any:
        """A rollout over the hosts."""
        return (agents_rollout_over if self.agents else rollout_over)(self.envs, **options)

    def weights(self, value: float) -> Any:
        """Weights of the rollout."""
        return weights_of_agents(value) if self.agents else weights(value)

    def makers(self, *slots: int) -> list[Any]:
        """Callables that make environments."""
        if not self.agents:
            return makers(*slots)
        return [partial(NumberedAgents, slot, **self.options) for slot in slots]

    def host(self, *slots: int, **options: Any) -> Any:
        """One in a thread, until it is left."""
        return self.host_of(self.makers(*slots), **options)

    def host_of(self, envs: list[Any], address: Any = None, **options: Any) -> Any:
        """Start a host of environments, which dials an address, or the rollout."""
        address = self.address if address is None else address
        if self.kind is not RolloutHost:
            return hosting(address, envs, **options)
        acting = {"module": modules_of_agents(), "agent_to_module_mapping_fn": module_of} if self.agents else {}
        return rollouts_on(address, envs, **acting, **options)

    def process_of(self, envs: list[Any], **options: Any) -> HostProcess:
        """Start a host in a process of its own, of environments in plain form."""
        return HostProcess(self.address, envs, kind=self.kind, has_agents=bool(self.agents), **options)
