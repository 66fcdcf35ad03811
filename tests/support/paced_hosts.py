"""Hosts whose rollout feeds a trainer that paces it, of one agent or several, and the rounds that its trainers take."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from feeding_rollouts import SHORT, agents_rollout_over, module_of, modules_of_agents, weights, weights_of_agents
from numbered_agents import NumberedAgents
from remote_hosts import HostProcess, hosting, listening
from remote_rollouts import HASTY, makers, rollout_over, rollouts_on, told
from serial_module import at_of

from rollflow import Columns, RemoteEnvs, RemoteRollouts, TrainerStream
from rollflow.nodes import RolloutHost
from rollflow.nodes.env.remote.host import Host
from rollflow.stream.wire import Limits


class Rounds:
    """Rounds that trainers of one rollout were handed, one at a time, after which they publish.

        max_lag    of the trainers
        weights    gives what they publish, of a value that is the version; dicts by module, where there are several

    lanes    of each round
    slots    of the environments in the last one
    steps    of all of them, and `steps_of` each slot
    """

    def __init__(self, max_lag: int, weights: Callable[[float], Any] = weights) -> None:
        self.lanes: list[set[int]] = []
        self.slots: set[int] = set()
        self.steps = 0
        self.steps_of: Counter[int] = Counter()
        self._max_lag, self._weights = max_lag, weights
        self._next: dict[int, int] = {}  # lane -> the number that its next fragment has

    def settings(self) -> dict[str, Any]:
        """Return the settings of a trainer that takes such rounds."""
        return {"max_lag": self._max_lag, "on_excess": "pace", "limits": SHORT}

    def publish(self, stream: TrainerStream) -> None:
        """Publish the next weights."""
        stream.publish(self._weights(stream.version + 1.0))

    def until(self, stream: TrainerStream, is_so: Callable[[], bool]) -> dict[str, Any]:
        """Take rounds until something holds behind one: what is to be saved then."""
        for batch in stream:
            self._take(stream, batch)
            saved = stream.state_dict()
            if is_so():
                return saved
            self.publish(stream)
        raise AssertionError("no more came")

    def rest(self, stream: TrainerStream) -> None:
        """Take rounds until no more come."""
        for batch in stream:
            self._take(stream, batch)
            self.publish(stream)

    def are_of(self, *lanes: int, times: int = 3) -> Callable[[], bool]:
        """Return True if the last few rounds were of these lanes."""
        begun = len(self.lanes)
        return lambda: len(self.lanes) >= begun + times and self.lanes[-times:] == [set(lanes)] * times

    def _take(self, stream: TrainerStream, batch: Any) -> None:
        assert len(self.lanes) < 3000
        assert all(each.lag is not None and each.lag <= self._max_lag for each in stream.handed)
        self.lanes.append({each.lane for each in stream.handed})
        assert len(stream.handed) == len(self.lanes[-1])
        self.slots = set()
        for part in [batch] if Columns.POLICY_VERSION in batch else batch.values():
            versions = np.asarray(part[Columns.POLICY_VERSION])
            assert int(versions.min()) >= stream.version - self._max_lag
            np.testing.assert_array_equal(part["weight"], versions)
            slots = at_of(part["obs"])[:, 0].tolist()
            self.slots |= set(slots)
            self.steps_of.update(slots)
            self.steps += len(versions)
        for each in stream.handed:
            assert each.sequence == self._next.get(each.lane, 0)
            self._next[each.lane] = each.sequence + 1


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

    def rounds(self, max_lag: int) -> Rounds:
        """Rounds of the rollout's trainers."""
        return Rounds(max_lag, self.weights)

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

    def process(self, *slots: int) -> HostProcess:
        """One in a process of its own."""
        env = {"env": NumberedAgents} if self.agents else {}
        return self.process_of(told(*slots, **self.options), **env)

    def process_of(self, envs: list[Any], **options: Any) -> HostProcess:
        """Start a host in a process of its own, of environments in plain form."""
        return HostProcess(self.address, envs, kind=self.kind, has_agents=bool(self.agents), **options)
