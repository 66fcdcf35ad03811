"""Equipment of hosts that do whole rollouts: settings, connectors' states and weights, each sent where it lacks."""

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollflow.nodes.env.remote.gateway import Gateway
from rollflow.nodes.env.remote.remote_host import RemoteHost
from rollflow.nodes.offloaded.replica import Published
from rollflow.stream.wire import GatewayConnection, Settings, States, Weights


@dataclass(slots=True)
class _Given:
    """Messages that a host has got through a connection; versions of weights by the ids of their modules."""

    connection: GatewayConnection
    has_settings: bool = False
    states: States | None = None
    versions: dict[Any, int] = field(default_factory=dict)


class HostEquipment:
    """Settings, states and weights of a rollout, and what each of its hosts has of them.

    gateway       that the hosts are connected to
    message_of    makes the message of a module's weights, of its id, their version and a `state_dict()`

    settings      None: the rollout has not begun
    states        of connectors; None: there are none
    """

    def __init__(self, gateway: Gateway, message_of: Callable[[Any, int, Mapping[str, Any]], Weights]) -> None:
        self.settings: Settings | None = None
        self.states: States | None = None
        self._gateway, self._message_of = gateway, message_of
        self._weights: dict[Any, Weights] = {}  # by the ids of their modules
        self._given: dict[bytes, _Given] = {}  # by the token of the host's session
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
        for token, given in list(self._given.items()):
            host = self._gateway.hosts.get(token)
            if host is not None and self._lacking(given):
                yield host

    def give(self, host: RemoteHost, *, is_urgent: bool) -> None:
        """Tell a host whatever of settings, states and weights it does not have yet.

        is_urgent    also while much is still on its way to it
        """
        gateway, connection = self._gateway, host.connection
        given = self._given.get(host.session.token)
        if given is None or given.connection is not connection:
            given = self._given[host.session.token] = _Given(connection)
        assert self.settings is not None
        if not given.has_settings:
            given.has_settings = gateway.tell(host, self.settings, connection)
        elif gateway.is_behind(host) and not is_urgent:
            return  # it has some to go on with, and gets the newest once those have arrived
        states = self.states
        if states is not given.states and states is not None and gateway.tell(host, states, connection):
            given.states = states
        for module_id, weights in self._lacking(given):
            if gateway.tell(host, weights, connection):
                given.versions[module_id] = weights.version

    def forget(self, host: RemoteHost) -> None:
        """Forget a host that has left."""
        self._given.pop(host.session.token, None)

    def close(self) -> None:
        """Wake nobody any more."""
        with self._publishing:
            self._is_closed = True

    def _lacking(self, given: _Given) -> list[tuple[Any, Weights]]:
        weights = self._weights.items()
        return [(each, message) for each, message in weights if message.version > given.versions.get(each, -1)]

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
