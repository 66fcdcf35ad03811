"""Equipment of hosts that do whole rollouts: settings, connectors' states and weights, each sent where it lacks."""

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollflow.nodes.env.remote.gateway import Gateway
from rollflow.nodes.env.remote.remote_host import RemoteHost
from rollflow.nodes.offloaded.replica import Published
from rollflow.stream.wire import GatewayConnection, Settings, States, Weights


@dataclass(slots=True, eq=False)
class _Stock:
    """Messages that a host has got through a connection.

    versions    module id in messages -> version of the weights that it has
    """

    connection: GatewayConnection
    has_settings: bool = False
    states: States | None = None
    versions: dict[str | None, int] = field(default_factory=dict)


class HostEquipment:
    """Settings, states and weights of a rollout, and what each of its hosts has of them.

    message_of    makes the message of a module's weights, of its id, their version and a `state_dict()`

    settings      None: the rollout has not begun
    states        of connectors; None: there are none
    """

    def __init__(self, gateway: Gateway, message_of: Callable[[Any, int, Mapping[str, Any]], Weights]) -> None:
        self.settings: Settings | None = None
        self.states: States | None = None
        self._gateway, self._message_of = gateway, message_of
        self._weights: dict[Any, Weights] = {}  # by the ids of their modules
        self._stocks: dict[bytes, _Stock] = {}  # by the token of the host's session
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

    def give(self, host: RemoteHost, *, is_urgent: bool) -> None:
        """Tell a host whatever of settings, states and weights it does not have yet.

        is_urgent    also while much is still on its way to it
        """
        gateway, connection = self._gateway, host.connection
        stock = self._stocks.get(host.session.token)
        if stock is None or stock.connection is not connection:
            stock = self._stocks[host.session.token] = _Stock(connection)
        assert self.settings is not None
        if not stock.has_settings:
            stock.has_settings = gateway.tell(host, self.settings, connection)
        elif gateway.is_behind(host) and not is_urgent:
            return  # it has some to go on with, and gets the newest once those have arrived
        states = self.states
        if states is not stock.states and states is not None and gateway.tell(host, states, connection):
            stock.states = states
        for weights in self._lacking(stock):
            if gateway.tell(host, weights, connection):
                stock.versions[weights.module] = weights.version

    def forget(self, host: RemoteHost) -> None:
        """Forget a host that has left."""
        self._stocks.pop(host.session.token, None)

    def close(self) -> None:
        """Wake nobody any more."""
        with self._publishing:
            self._is_closed = True

    def _lacking(self, stock: _Stock) -> list[Weights]:
        versions = stock.versions
        return [each for each in self._weights.values() if versions.get(each.module, -1) < each.version]

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
