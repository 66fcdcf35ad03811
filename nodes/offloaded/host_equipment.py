"""Equipment of hosts that do whole rollouts: settings, connectors' states and weights, each sent where it lacks."""

import threading
from collections.abc import Callable, Iterator, Mapping
from math import inf
from typing import Any

from rollflow.nodes.env.remote.host_carrier import HostCarrier
from rollflow.nodes.env.remote.remote_host import HostShared, RemoteHost
from rollflow.nodes.env.workers.lane_supervisor import LanePhase
from rollflow.nodes.offloaded.replica import Published
from rollflow.nodes.offloaded.weight_shares import HostStock, WeightShares
from rollflow.stream.wire import Settings, States, Weights


class HostEquipment:
    """Settings, states and weights of a rollout, and what each of its hosts has of them.

    carrier       of lanes to the hosts. One that is to share weights has a quarter of its step_timeout
    message_of    makes the message of a module's weights, of its id, their version and a `state_dict()`

    settings      None: the rollout has not begun
    states        of connectors; None: there are none
    """

    def __init__(self, carrier: HostCarrier, message_of: Callable[[Any, int, Mapping[str, Any]], Weights]) -> None:
        step_timeout = carrier.supervisor.limits.step_timeout
        self.settings: Settings | None = None
        self.states: States | None = None
        self._carrier, self._gateway, self._message_of = carrier, carrier.gateway, message_of
        self._weights: dict[Any, Weights] = {}  # by the ids of their modules
        self._stocks: dict[bytes, HostStock] = {}  # by the token of the host's session
        self._shares = WeightShares(self._gateway, inf if step_timeout is None else step_timeout / 4)
        self._publishing = threading.Lock()
        self._is_closed = False

    def begin(self, settings: Settings, first: Published) -> None:
        """Have hosts get settings, and the first weights where none were published."""
        self.settings = settings
        self._keep(first)

    def publish(self, published: Published) -> None:
        """Have every host get these weights, which are copied. From any thread."""
        self._keep(published, wakes=True)

    def outdated(self) -> Iterator[RemoteHost]:
        """The hosts that lack some weights."""
        for token, stock in list(self._stocks.items()):
            host = self._gateway.hosts.get(token)
            if host is not None and self._lacking(stock):
                yield host

    @property
    def patience(self) -> float | None:
        """Seconds after which to look for outdated hosts again; None: when there is news."""
        return self._shares.patience

    @property
    def held_up(self) -> list[RemoteHost]:
        """Hosts whose next turn waits for weights that another host is to share."""
        return self._shares.held_up

    def begin_held_up(self) -> None:
        """Have the time begin anew of lanes that can't begin, since another host has not shared its weights yet."""
        for host in self.held_up:
            for remote in self._carrier.lanes_of(host):
                if remote.status.phase is LanePhase.LATE:
                    self._carrier.supervisor.begin(remote.status, LanePhase.STEPPING)
                else:
                    self._carrier.supervisor.watch(remote.status)

    def give(self, host: RemoteHost, *, is_urgent: bool, has_turn: bool) -> None:
        """Tell a host whatever of settings, states and weights it does not have yet.

        is_urgent    also while much is still on its way to it
        has_turn     it is about to take a turn
        """
        gateway, connection = self._gateway, host.connection
        stock = self._stocks.get(host.session.token)
        if stock is None or stock.connection is not connection:
            stock = self._stocks[host.session.token] = HostStock(host, connection)
        assert self.settings is not None
        if not stock.has_settings:
            stock.has_settings = gateway.tell(host, self.settings, connection)
        elif gateway.is_behind(host) and not is_urgent:
            return  # it has some to go on with, and gets the newest once those have arrived
        states = self.states
        if states is not stock.states and states is not None and gateway.tell(host, states, connection):
            stock.states = states
        for weights in self._lacking(stock):
            self._shares.deliver(stock, weights, has_turn=has_turn)

    def take(self, event: HostShared) -> None:
        """Take a host's word of weights that the hosts of a machine share."""
        stock = self._stocks.get(event.host.session.token)
        if stock is not None:
            self._shares.take(stock, event.message, self._stocks.values())

    def forget(self, host: RemoteHost) -> None:
        """Forget a host that has left."""
        self._stocks.pop(host.session.token, None)
        self._shares.forget(host)

    def close(self) -> None:
        """Wake nobody any more."""
        with self._publishing:
            self._is_closed = True

    def _lacking(self, stock: HostStock) -> list[Weights]:
        return [weights for weights in self._weights.values() if not stock.has(weights.module, weights.version)]

    def _keep(self, published: Published, *, wakes: bool = False) -> None:
        """Keep those weights that are newer than what there is."""
        messages = {each: self._message_of(each, *newest) for each, newest in published.items()}
        with self._publishing:
            if self._is_closed:
                return
            newer = {
                each: message
                for each, message in messages.items()
                if each not in self._weights or message.version > self._weights[each].version
            }
            self._weights = {**self._weights, **newer}
            if wakes:
                self._gateway.wake()
