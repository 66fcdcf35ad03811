"""Ways of weights to the hosts of a rollout: whole, or by another host of the same machine, which gets them whole."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import inf
from time import monotonic

from rollflow.nodes.env.remote.gateway import Gateway
from rollflow.nodes.env.remote.remote_host import RemoteHost
from rollflow.stream.wire import (
    ConnectionPhase,
    GatewayConnection,
    States,
    Weights,
    WeightsComing,
    WeightsShared,
    WeightsUnread,
)

_LEAST_BYTES = 1 << 16  # of weights: fewer are sent whole, at once
_PATIENCE_S = 5.0  # with a host that takes no more bytes and has not shared its weights
_LOOK_S = 0.25  # whether such a host is lost
_MOST_FAILURES = 2  # after which a host gets all weights whole

Module = str | None  # id in messages


@dataclass(slots=True, eq=False)
class HostStock:
    """Messages that a host has got through a connection.

    versions    module -> version of the weights that it has, or can read
    awaited     modules whose newest weights its next turn waits for, which are another host's yet
    failures    how often it could not share weights, or not read shared ones
    """

    host: RemoteHost
    connection: GatewayConnection
    has_settings: bool = False
    states: States | None = None
    versions: dict[Module, int] = field(default_factory=dict)
    awaited: set[Module] = field(default_factory=set)
    failures: int = 0

    @property
    def is_connected(self) -> bool:
        """True where the connection is the host's newest, and is not lost."""
        is_newest = self.host.connection is self.connection and self.host.lost_at is None
        return is_newest and self.connection.phase is ConnectionPhase.RUNNING

    @property
    def machine(self) -> str | None:
        """Name of the machine on which it shares weights; None: it gets all of them whole."""
        return None if self.failures >= _MOST_FAILURES else self.host.session.hello.machine

    def has(self, module: Module, version: int) -> bool:
        """True where it has weights of this version, or newer ones."""
        return self.versions.get(module, -1) >= version


@dataclass(slots=True, eq=False)
class _Share:
    """Weights that one host of a machine gets whole, for all of them.

    where    message of where they lie; None: the host has not said yet
    left     bytes that were on their way to it when it took some last
    since    when that was, on the clock `monotonic`
    """

    version: int
    stock: HostStock
    where: WeightsShared | None = None
    left: int = 0
    since: float = field(default_factory=monotonic)

    def is_hopeless(self, patience_s: float) -> bool:
        """True where the host that has the weights is lost, or is silent about them for too long."""
        connection, now = self.stock.connection, monotonic()
        left = connection.undelivered + connection.queued()
        if left != self.left:
            self.left, self.since = left, now
        return not self.stock.is_connected or now - self.since > patience_s


class WeightShares:
    """Delivers weights to hosts: each version goes to one host of a machine, and the others read them there.

    gateway       that the hosts are connected to
    patience_s    seconds after which a host that is silent is passed over, if that is sooner than it is else

    Nothing depends on that host: where it is lost, or the others can't read, one of these gets the newest weights whole
    and shares them in its place. On a machine one version of a module is on its way at a time.
    """

    def __init__(self, gateway: Gateway, patience_s: float = inf) -> None:
        self._gateway, self._most_patience_s = gateway, patience_s
        self._waiting: set[HostStock] = set()  # those that await some
        self._shares: dict[tuple[str, Module], _Share] = {}  # the newest of each machine and module

    @property
    def patience(self) -> float | None:
        """Seconds after which hosts that lack weights are to be looked at again; None: when there is news."""
        is_waiting = any(share.where is None for share in list(self._shares.values()))
        return min(_LOOK_S, self._most_patience_s) if is_waiting else None

    @property
    def held_up(self) -> list[RemoteHost]:
        """Hosts whose next turn waits for weights that another host is to share."""
        return [stock.host for stock in self._waiting if stock.is_connected]

    def deliver(self, stock: HostStock, weights: Weights, *, has_turn: bool) -> None:
        """Give a host a module's newest weights, unless others of its machine are on their way: these come first.

        has_turn    it is about to take a turn, which then waits for the newest
        """
        machine, module = stock.machine, weights.module
        if machine is None or sum(array.nbytes for array in weights.tensors.values()) < _LEAST_BYTES:
            self._send(stock, weights)
            return
        share = self._share_of(machine, module)
        if share is not None and share.where is not None and share.version == weights.version:
            self._send(stock, share.where)
        elif share is None or share.where is not None:
            is_shared = self._gateway.count_on(machine) > 1
            if self._send(stock, replace(weights, share=True) if is_shared else weights) and is_shared:
                self._shares[machine, module] = _Share(weights.version, stock)
        elif has_turn:
            if self._gateway.tell(stock.host, WeightsComing(weights.version, module), stock.connection):
                self._await(stock, module)

    def take(self, stock: HostStock, message: WeightsShared | WeightsUnread, others: Iterable[HostStock]) -> None:
        """Take word of shared weights; hosts of the machine that lack these are told where they lie.

        others    what hosts have got
        """
        machine, module = stock.host.session.hello.machine, message.module
        share = None if machine is None else self._shares.get((machine, module))
        if isinstance(message, WeightsUnread):
            self._take_failure(stock, message, share)
        elif share is not None and share.stock is stock and share.version == message.version and share.where is None:
            share.where, stock.failures = message, 0
            for other in others:
                if other.machine == machine:
                    self._send(other, message)

    def forget(self, host: RemoteHost) -> None:
        """Forget a host that has left, and what it has shared."""
        self._shares = {key: share for key, share in self._shares.items() if share.stock.host is not host}
        self._waiting = {stock for stock in self._waiting if stock.host is not host}

    def _await(self, stock: HostStock, module: Module) -> None:
        stock.awaited.add(module)
        self._waiting = {each for each in self._waiting if each.is_connected} | {stock}

    def _send(self, stock: HostStock, message: Weights | WeightsShared) -> bool:
        """Tell a host of weights; False: it could not be told, or has newer ones."""
        module, version = message.module, message.version
        if stock.has(module, version) or not self._gateway.tell(stock.host, message, stock.connection):
            return False
        stock.versions[module] = version
        stock.awaited.discard(module)
        if not stock.awaited:
            self._waiting.discard(stock)
        return True

    def _share_of(self, machine: str, module: Module) -> _Share | None:
        """The share of a machine; None: there is none, or none is to be hoped for."""
        share = self._shares.get((machine, module))
        if share is not None and share.where is None and share.is_hopeless(min(_PATIENCE_S, self._most_patience_s)):
            share.stock.failures += 1
            del self._shares[machine, module]
            return None
        return share

    def _take_failure(self, stock: HostStock, message: WeightsUnread, share: _Share | None) -> None:
        """Take note that a host could not share its weights, or not read those of another: it lacks them again."""
        module = message.module
        if message.mark is not None and stock.versions.get(module) == message.version:
            del stock.versions[module]
            self._await(stock, module)
        if share is None:
            return
        is_its_own = message.mark is None and share.stock is stock and share.where is None
        if is_its_own or (share.where is not None and share.where.mark == message.mark):
            stock.failures += share.stock.is_connected  # else the file may be gone with its host
            self._shares = {key: each for key, each in self._shares.items() if each is not share}
