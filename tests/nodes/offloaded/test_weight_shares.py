"""Every host comes to the newest weights, whatever becomes of the hosts that share them, and few are sent twice."""

from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from property_examples import examples

from rollflow.nodes.offloaded.weight_shares import HostStock, WeightShares
from rollflow.stream.wire import ConnectionPhase, Weights, WeightsComing, WeightsShared, WeightsUnread

HOSTS = st.integers(0, 4)
MACHINES = ["a", "a", "a", "b", None]


def weights_of(version: int) -> Weights:
    return Weights(version, {"w": np.zeros(20_000, np.float32)}, {}, {})


@dataclass(eq=False)
class Simulated:
    """A host that takes what it is sent when a test lets it.

    files      marks of all files that can be read, of every host
    version    newest weights that it has
    expected   version that its next turn waits for
    """

    number: int
    files: set[bytes]
    sent: deque[Any] = field(default_factory=deque)
    version: int = -1
    expected: int = -1
    answers: list[Any] = field(default_factory=list)
    lost_at: float | None = None
    can_read: bool = True
    can_share: bool = True
    is_silent: bool = False

    def __post_init__(self) -> None:
        self.session = SimpleNamespace(hello=SimpleNamespace(machine=MACHINES[self.number]))
        self.reconnect()

    def reconnect(self) -> None:
        """Have another connection: what was on its way is lost, and all weights are to come again."""
        self.connection = SimpleNamespace(phase=ConnectionPhase.RUNNING, undelivered=0, queued=lambda: 0)
        self.sent.clear()
        self.expected, self.lost_at = 0, None

    def take_one(self) -> None:
        message = self.sent.popleft()
        match message:
            case Weights():
                self.version = max(self.version, message.version)
                if message.share and not self.is_silent:
                    mark = self.number.to_bytes(8) + message.version.to_bytes(8)
                    self.files |= {mark} if self.can_share else set()
                    shared = WeightsShared(message.version, 1, 1, 64, mark)
                    self.answers.append(shared if self.can_share else WeightsUnread(message.version, None))
            case WeightsComing():
                self.expected = max(self.expected, message.version)
            case WeightsShared() if self.can_read and message.mark in self.files:
                self.version = max(self.version, message.version)
            case WeightsShared():
                self.expected = max(self.expected, message.version)
                self.answers.append(WeightsUnread(message.version, message.mark))


class Delivery(RuleBasedStateMachine):
    """Weights that are published while hosts take what they are sent, are lost, come back, and fail."""

    @initialize()
    def begin(self) -> None:
        files: set[bytes] = set()
        self.hosts = [Simulated(number, files) for number in range(len(MACHINES))]
        self.version = self.whole = 0
        self.gateway = SimpleNamespace(count_on=MACHINES.count, tell=self.tell)
        self.shares = WeightShares(self.gateway)  # type: ignore[arg-type]
        self.stocks = [HostStock(host, host.connection) for host in self.hosts]  # type: ignore[arg-type]

    def tell(self, host: Simulated, message: Any, connection: Any) -> bool:
        if host.connection is not connection or host.lost_at is not None:
            return False
        self.whole += isinstance(message, Weights) and MACHINES[host.number] == "a"
        host.sent.append(message)
        return True

    @rule()
    def publish(self) -> None:
        self.version += 1

    @rule(at=HOSTS, has_turn=st.booleans())
    def give(self, at: int, *, has_turn: bool) -> None:
        if not self.stocks[at].has(None, self.version):
            self.shares.deliver(self.stocks[at], weights_of(self.version), has_turn=has_turn)
            if has_turn and self.hosts[at].lost_at is None:  # the turn waits for no older ones
                assert max(message.version for message in self.hosts[at].sent) == self.version

    @rule(at=HOSTS)
    def take_one(self, at: int) -> None:
        if self.hosts[at].sent:
            self.hosts[at].take_one()

    @rule(at=HOSTS)
    def hear(self, at: int) -> None:
        host, answers = self.hosts[at], self.hosts[at].answers
        if answers and host.lost_at is None:
            self.shares.take(self.stocks[at], answers.pop(0), self.stocks)

    @rule(at=HOSTS)
    def lose(self, at: int) -> None:
        self.hosts[at].lost_at = 0.0
        self.hosts[at].answers.clear()

    @rule(at=HOSTS)
    def come_back(self, at: int) -> None:
        host = self.hosts[at]
        host.answers.clear()
        host.reconnect()
        self.stocks[at] = HostStock(host, host.connection)  # type: ignore[arg-type]

    @rule(at=HOSTS)
    def leave_and_come_anew(self, at: int) -> None:
        """Another host comes in place of one whose process, and files, are gone."""
        self.shares.forget(self.hosts[at])  # type: ignore[arg-type]
        files = self.hosts[at].files
        files -= {mark for mark in files if mark.startswith(at.to_bytes(8))}
        self.hosts[at] = host = Simulated(at, files)
        self.stocks[at] = HostStock(host, host.connection)  # type: ignore[arg-type]

    @rule(at=HOSTS, can_read=st.booleans(), can_share=st.booleans(), is_silent=st.booleans())
    def fail(self, at: int, *, can_read: bool, can_share: bool, is_silent: bool) -> None:
        self.hosts[at].can_read, self.hosts[at].can_share, self.hosts[at].is_silent = can_read, can_share, is_silent

    @invariant()
    def nobody_waits_for_what_was_not_published(self) -> None:
        assert all(host.expected <= self.version for host in self.hosts)

    def teardown(self) -> None:
        """Hosts that are there and take what they are sent come to the newest weights, and wait for none."""
        with pytest.MonkeyPatch.context() as patch:
            if any(host.is_silent or host.lost_at is not None for host in self.hosts):
                patch.setattr("rollflow.nodes.offloaded.weight_shares._PATIENCE_S", -1.0)
            for _ in range(12):
                for at, host in enumerate(self.hosts):
                    self.give(at, has_turn=False)
                    while host.sent:
                        host.take_one()
                    while host.answers and host.lost_at is None:
                        self.hear(at)
        for host in self.hosts:
            assert host.lost_at is not None or host.version == self.version >= host.expected


TestDelivery = Delivery.TestCase
TestDelivery.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)


def test_who_can_not_read_since_the_sharer_is_gone_has_not_failed() -> None:
    run = Delivery()
    run.begin()
    for is_there in (True, False):
        run.publish()
        run.give(0, has_turn=False)
        run.take_one(0)
        run.hear(0)  # the others are told where the weights lie
        run.hosts[1].can_read = False
        if not is_there:
            run.lose(0)
        run.take_one(1)
        assert len(run.hosts[1].answers) == 1
        run.hear(1)
        assert run.stocks[1].failures == 1


def test_each_version_is_sent_whole_to_one_host_of_a_machine() -> None:
    run = Delivery()
    run.begin()
    for _ in range(20):
        run.publish()
        for at in range(len(MACHINES)):
            run.give(at, has_turn=True)
        for _ in range(2):
            for at, host in enumerate(run.hosts):
                while host.sent:
                    host.take_one()
                while host.answers:
                    run.hear(at)
        assert [host.version for host in run.hosts] == [run.version] * len(MACHINES)
    assert run.whole == 20
    run.teardown()
