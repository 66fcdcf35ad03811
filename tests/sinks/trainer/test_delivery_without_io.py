"""A trainer and rollouts that feed it, step by step: every fragment is handed over once, whatever breaks or is killed.

Both ends are those of a real run, but for the sockets between them, and for what fragments are made of: bytes come when
they are drawn to, connections are cut, lanes are lost, and either end may be killed, at any step.
"""

import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from time import monotonic
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from property_examples import examples
from wire_ends import taken_from

from rollflow import Fragment, TrainerStream
from rollflow.sinks import Batches, Sources
from rollflow.sinks.trainer.messages import UNKNOWN
from rollflow.sinks.trainer.pace_gate import PaceGate, ResendBuffer
from rollflow.sinks.trainer.rollout_peer import ArrivedItem, RolloutConnection, RolloutPeer
from rollflow.sinks.trainer.stream import _NOT_YET
from rollflow.sinks.trainer.uplink import TrainerUplink
from rollflow.stream import wire
from rollflow.stream.data.errors import WireError
from rollflow.stream.net.backoff import WaitReminder
from rollflow.stream.net.endpoint import endpoint_at
from rollflow.stream.net.socket_loop import Peer

NOWHERE = "unix:/nowhere"
ALL = 1 << 20  # bytes
SOME = st.integers(0, 400) | st.just(ALL)


class Piece(Fragment):
    """A fragment of which only this is looked at; an empty one has no version."""

    def __init__(self, lane: int, sequence: int, version: int | None) -> None:
        self.lane, self.sequence, self.version = lane, sequence, version

    @property
    def num_steps(self) -> int:
        return int(not self.is_empty)

    @property
    def is_empty(self) -> bool:
        return self.version is None


def read(source: RolloutPeer, message: wire.Fragment) -> ArrivedItem:
    """The item of a message, in place of `RolloutPeer.read`."""
    piece = Piece(message.lane, message.rest["sequence"], message.rest["version"])
    return ArrivedItem(source, message.number, piece, piece.version)


def without_sockets(end: Any) -> None:
    """Have an end decide alone: its sockets are the world's."""
    end._loop.close()
    end._loop = SimpleNamespace(
        lock=end._loop.lock, wakeup=mock.Mock(), peers=[], peer_of=lambda connection: None, drop=lambda peer: None
    )


@dataclass
class Lane:
    """One that goes round.

    version    that the fragment under way has begun with; None: none is
    is_lost    whether its host is, which is seen when it is to be stepped
    """

    index: int
    sequence: int = 0
    version: int | None = None
    is_lost: bool = False

    @property
    def at_start(self) -> bool:
        return self.version is None


class Rollout:
    """Lanes, a gate, what a sink does with what they give, and the link to a trainer.

    given        steps of all fragments that came to the sink
    has_ended    whether no lane begins another one
    """

    def __init__(self, name: str, lanes: int) -> None:
        self.lanes, self.count = {index: Lane(index) for index in range(lanes)}, lanes
        self.session = ResendBuffer(1 << 30)
        self.gate = PaceGate(self.session, "it", None, lambda: None)
        endpoint = endpoint_at(NOWHERE, None, None, None)
        self.uplink = TrainerUplink(endpoint, name, self._described, self.session, self._publish)
        without_sockets(self.uplink)
        self.token = self.session.token
        self.under_way: deque[Piece] = deque()
        self.version = self.given = 0
        self.has_ended = False

    def _described(self) -> dict[str, Any]:
        newest = self.uplink.newest
        weights_id = newest[1] if newest is not None and newest[0] == self.version else None
        told = replace(UNKNOWN, version=self.version, weights_id=weights_id, aside=[*self.gate.aside.items()])
        return {"slots": (1,) * self.count, "metadata": told.plain()}

    def _publish(self, version: int, weights: Any) -> bool:
        is_newer, self.version = version > self.version, max(version, self.version)
        return is_newer

    def work(self, place: int) -> None:
        """Have a lane begin a fragment, or end it."""
        if not self.lanes:
            return
        lane = list(self.lanes.values())[place % len(self.lanes)]
        if lane.version is not None:
            self._emit(lane, lane.version)
        elif not self.has_ended and len(self.under_way) < 4 and self.gate.admits(lane):
            if lane.is_lost:
                self._leave(lane)
            else:
                lane.version = self.version

    def lose(self, place: int) -> None:
        """A lane's host is gone, maybe in the middle of a fragment."""
        if self.lanes:
            lane = list(self.lanes.values())[place % len(self.lanes)]
            lane.is_lost = True
            if lane.version is not None:
                self._leave(lane)

    def give(self) -> None:
        """Have the sink look at what there is."""
        self.gate.version = self.version
        for news in self.gate.take_news(self.session.given):
            self.uplink.tell(news)
        most = 1 if self.session.order is None else self.session.order["window"]
        if self.under_way and self.session.given - self.session.done < most:
            piece = self.under_way.popleft()
            self.gate.give(piece.lane, piece.sequence)
            rest = {"sequence": piece.sequence, "version": piece.version}
            self.session.add(wire.Fragment(piece.lane, self.session.given + 1, {}, rest), 1, piece.num_steps)
            self.given += piece.num_steps
        is_over = self.has_ended and all(lane.at_start for lane in self.lanes.values())
        if (is_over or not self.lanes) and not self.under_way:
            self.uplink.finish()

    def _leave(self, lane: Lane) -> None:
        del self.lanes[lane.index]
        self.gate.gone(lane.index, lane.sequence + 1)
        self._emit(lane, lane.version)

    def _emit(self, lane: Lane, version: int | None) -> None:
        self.under_way.append(Piece(lane.index, lane.sequence, version))
        lane.sequence, lane.version = lane.sequence + 1, None


class Link:
    """A connection of a rollout with a trainer, and the bytes on their way to each end."""

    def __init__(self, rollout: Rollout, trainer: Any) -> None:
        transport: Any = None
        self.rollout, self.listener = rollout, trainer
        self.near: Peer[Any] = Peer(transport, rollout.uplink.connection(0.0), "a trainer")
        self.far = RolloutConnection(transport, trainer.connection(0.0), "a rollout")
        self.way = {True: b"", False: b""}

    def send(self) -> None:
        """Have both ends say what is new."""
        if self.near.connection.is_open:
            self.rollout.uplink._send(self.near)
        if self.far.connection.is_open:
            self.listener._tell(self.far)

    def carry(self, up: bool, count: int) -> None:
        giver, taker = (self.near, self.far) if up else (self.far, self.near)
        data = self.way[up] + taken_from(giver.connection)
        self.way[up] = data[count:]
        for event in taker.connection.receive(data[:count], 0.0):
            assert not isinstance(event, WireError), event
            (self.listener if up else self.rollout.uplink).handle(taker, event, 0.0)


class Delivery(RuleBasedStateMachine):
    """A trainer, which may be killed and go on from what it saved, and rollouts, which may be killed for good.

    handed    token of a rollout, lane -> sequences of its fragments that were handed over, to the trainer as it is now
    saved     state of the trainer, and what had been handed over then
    """

    def __init__(self) -> None:
        super().__init__()
        self.reading = mock.patch.object(RolloutPeer, "read", read)
        self.reading.start()

    @initialize(
        lanes=st.lists(st.integers(1, 3), min_size=1, max_size=2),
        max_lag=st.none() | st.integers(0, 2),
        fragments=st.none() | st.integers(1, 3),
        acks=st.booleans(),
        prefetch=st.integers(0, 1),
        saves=st.booleans(),
    )
    def begin(
        self, lanes: list[int], max_lag: int | None, fragments: int | None, acks: bool, prefetch: int, saves: bool
    ) -> None:
        self.options: dict[str, Any] = {"max_lag": max_lag, "ack": "auto" if acks else "manual", "prefetch": prefetch}
        self.options["yields"] = Batches(fragments=fragments if max_lag is None else None)
        self.options["on_excess"] = "drop" if max_lag is None else "pace"
        self.saves = saves  # after every batch
        self.names = iter(range(1000))
        self.handed: dict[tuple[bytes, int], list[int]] = {}
        self.killed: list[Rollout] = []
        self.rollouts = [Rollout(f"rollout {next(self.names)}", count) for count in lanes]
        self.count = 0
        self.start_trainer()
        self.save()

    def start_trainer(self) -> None:
        self.stream = TrainerStream(NOWHERE, sources=Sources(len(self.rollouts), join_timeout=None), **self.options)
        self.stream._state = "running"
        self.stream._item_maker = mock.Mock(item_of=list)
        self.listener = self.stream._listener
        without_sockets(self.listener)
        self.has_published = True
        self.links = {rollout: Link(rollout, self.listener) for rollout in self.rollouts}

    def stop_trainer(self) -> None:
        self.listener.bell.close()

    def some(self, place: int) -> Rollout:
        return self.rollouts[place % len(self.rollouts)]

    @rule(which=st.integers(0, 1), place=st.integers(0, 3))
    def work(self, which: int, place: int) -> None:
        self.some(which).work(place)

    @rule(which=st.integers(0, 1))
    def give(self, which: int) -> None:
        self.some(which).give()

    @rule(which=st.integers(0, 1))
    def send(self, which: int) -> None:
        self.links[self.some(which)].send()

    @rule(which=st.integers(0, 1), up=st.booleans(), count=SOME)
    def carry(self, which: int, up: bool, count: int) -> None:
        self.links[self.some(which)].carry(up, count)

    @rule()
    def publish(self) -> None:
        """At most once for each batch, and before the next is asked for."""
        if not self.has_published:
            self.stream.publish({})
            self.has_published = True

    @rule()
    def save(self) -> None:
        """Before weights are published that go with it."""
        state = self.stream.state_dict()
        self.saved = json.dumps(state), {lane: [*each] for lane, each in self.handed.items()}
        if self.options["ack"] == "manual":
            self.stream.ack(state)

    @rule()
    def ask(self) -> None:
        """The trainer asks for the next batch, which is as it should be."""
        self.has_published = True  # or never will be
        self.stream._move_on()
        item = self.stream._try_next(WaitReminder(None))
        self.is_over = item is None
        if item is None or item is _NOT_YET:
            return
        self.has_published = False
        self.count += 1
        is_paced, version = self.options["max_lag"] is not None, self.stream.version
        lanes = [(arrived.source, arrived.lane) for arrived in item]
        assert not is_paced or len(set(lanes)) == len(lanes)
        for arrived in item:
            piece, so_far = arrived.item, self.handed.setdefault((arrived.source.session.token, arrived.lane), [])
            assert not is_paced or piece.version >= version - self.options["max_lag"]
            if is_paced or not (self.saves or self.options["ack"] == "manual"):
                assert piece.sequence > (so_far[-1] if so_far else -1)  # those of an earlier trainer may be left out
            else:
                assert piece.sequence == len(so_far)
            so_far.append(piece.sequence)
        if self.saves:
            self.save()

    @rule(times=st.integers(1, 4))
    def everything_goes_on(self, times: int) -> None:
        """Have all that there is do something."""
        for _ in range(times):
            for rollout in self.rollouts:
                for place in range(4):
                    rollout.work(place)
                    rollout.give()
                self.links[rollout].send()
                for up in (True, False) * 2:
                    self.links[rollout].carry(up, ALL)
            self.publish()
            self.ask()

    @rule(which=st.integers(0, 1), place=st.integers(0, 3))
    def lose_a_lane(self, which: int, place: int) -> None:
        self.some(which).lose(place)

    @rule(which=st.integers(0, 1), is_noticed=st.booleans(), lost=SOME)
    def cut(self, which: int, is_noticed: bool, lost: int) -> None:
        """A connection is lost; the trainer may notice only when the next one comes."""
        rollout = self.some(which)
        link = self.links[rollout]
        link.way[True] = link.way[True][:lost]
        link.carry(True, ALL)
        if is_noticed and link.far.connection.is_open and link.far.source is not None:
            self.listener.fail(link.far, WireError("cut", "lost"), monotonic())
        self.links[rollout] = Link(rollout, self.listener)

    @rule()
    def kill_the_trainer(self) -> None:
        self.stop_trainer()
        state, handed = self.saved
        self.start_trainer()
        self.stream.load_state_dict(json.loads(state))
        self.handed = {lane: [*each] for lane, each in handed.items()}
        if self.options["max_lag"] is not None:
            self.stream.publish({})

    @precondition(lambda self: len(self.killed) < 3)
    @rule(which=st.integers(0, 1))
    def kill_a_rollout(self, which: int) -> None:
        """Another one is started, and this one is not waited for for ever."""
        rollout = self.some(which)
        del self.links[rollout]
        source = self.listener.sources.get(rollout.token)
        if source is not None and source.is_present:
            source.lose(-1e9, "killed", comes_back=True)
        self.listener._leave_overdue(monotonic())
        self.killed.append(rollout)
        other = Rollout(f"rollout {next(self.names)}", rollout.count)
        self.rollouts[self.rollouts.index(rollout)] = other
        self.links[other] = Link(other, self.listener)

    def all_go_on(self, rounds: int) -> Iterator[None]:
        for _ in range(rounds):
            self.everything_goes_on(1)
            yield

    def teardown(self) -> None:
        try:
            if hasattr(self, "rollouts"):
                self.end()
                self.stop_trainer()
        finally:
            self.reading.stop()

    def end(self) -> None:
        """With connections that hold all goes on, and comes to its end."""
        for rollout in self.rollouts:
            self.links[rollout] = Link(rollout, self.listener)
        begun = self.count
        for _ in self.all_go_on(40):
            pass
        assert self.count >= begun + 3 or not any(rollout.lanes for rollout in self.rollouts)
        for rollout in self.rollouts:
            rollout.has_ended = True
        assert any(self.is_over for _ in self.all_go_on(200))
        tokens = {rollout.token for rollout in self.rollouts}
        handed = sum(len(each) for (token, _), each in self.handed.items() if token in tokens)
        given = sum(rollout.given for rollout in self.rollouts)
        # What is left out as too old, or was by a trainer that was killed before it saved that, is counted.
        counted = self.stream.missed + self.stream.lost.get("max_lag", 0)
        assert handed <= given <= handed + counted
        if self.options["max_lag"] is None and (self.saves or self.options["ack"] == "manual"):
            assert handed == given


def test_every_fragment_is_handed_over_once_whatever_breaks_or_is_killed() -> None:
    drawn = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
    run_state_machine_as_test(Delivery, settings=drawn)


ORDER = {"window": 4, "ahead": None, "version": 0, "needs": 1, "stays": False}


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (wire.Settings({}), "settings.window is None, expected a whole number"),
        (wire.Settings(ORDER | {"ahead": "x"}), "settings.ahead is 'x', expected a whole number"),
        (wire.Settings(ORDER | {"stays": 1}), "settings.stays is 1, expected true or false"),
        (
            wire.Weights(1, {"w": np.zeros(3, np.uint8)}, {"w": "none"}, {}),
            "no weights: ModuleError: .*'none'",
        ),
        (wire.Weights(1, {"w": np.zeros(3, np.uint8)}, {"w": 7}, {}), "no weights: TypeError"),
        (wire.Weights(1, {"w": None}, {}, {}), "no weights: TypeError"),
    ],
)
def test_nonsense_of_a_trainer_ends_a_rollout_in_words(message: Any, told: str) -> None:
    rollout = Rollout("it", 1)
    peer: Peer[Any] = Peer(mock.Mock(), rollout.uplink.connection(0.0), "a trainer")
    peer.dialled = mock.Mock()
    with pytest.raises(WireError, match=told) as caught:
        rollout.uplink.handle(peer, message, 0.0)
    assert rollout.session.order is None
    rollout.uplink._is_welcomed = True
    with pytest.raises(WireError, match=f"^trainer unix:/nowhere: .*{told}"):
        rollout.uplink.fail(peer, caught.value, 0.0)
    assert peer.connection.error is not None  # which the trainer is told
