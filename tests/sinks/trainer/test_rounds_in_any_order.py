"""A trainer and a rollout whose lanes may be lost, step by step: whatever happens in between, rounds are right.

Both ends are those of a real run, but for what lies between them: messages come when they are drawn to, connections are
cut, and trainers are started again, at any step.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings, strategies as st
from property_examples import examples

from rollflow import Fragment
from rollflow.sinks.trainer.item_maker import Batches
from rollflow.sinks.trainer.messages import UNKNOWN
from rollflow.sinks.trainer.pace_gate import PaceGate, ResendBuffer
from rollflow.sinks.trainer.rollout_peer import ArrivedItem, PeerLife, RolloutPeer
from rollflow.sinks.trainer.rounds import Rounds
from rollflow.stream.wire import Done, ReceiverSession

TOKEN = bytes(16)


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
    """Lanes, a gate, and what a sink does with what they give."""

    def __init__(self, lanes: int) -> None:
        self.lanes = {index: Lane(index) for index in range(lanes)}
        self.session = ResendBuffer(1 << 30)
        self.gate = PaceGate(self.session, "it", None, lambda: None)
        self.pieces: list[Piece] = []  # by their numbers
        self.under_way: deque[Piece] = deque()
        self.to_tell: deque[Any] = deque()
        self.version, self.next = 0, 1

    def work(self, place: int) -> None:
        """Have a lane begin a fragment, or end it."""
        if not self.lanes:
            return
        lane = list(self.lanes.values())[place % len(self.lanes)]
        if lane.version is not None:
            self._emit(lane, lane.version)
        elif self.gate.admits(lane) and lane.is_lost:
            self._leave(lane)
        elif self.gate.admits(lane):
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
        self.to_tell += self.gate.take_news(self.session.given)
        window = 1 if self.session.order is None else self.session.window
        if self.under_way and self.session.given - self.session.done < window:
            piece = self.under_way.popleft()
            self.gate.give(piece.lane, piece.sequence)
            self.pieces.append(piece)
            message: Any = SimpleNamespace(number=self.session.given + 1, lane=piece.lane)
            self.session.add(message, 1, 1)

    def _leave(self, lane: Lane) -> None:
        del self.lanes[lane.index]
        self.gate.gone(lane.index, lane.sequence + 1)
        self._emit(lane, lane.version)

    def _emit(self, lane: Lane, version: int | None) -> None:
        self.under_way.append(Piece(lane.index, lane.sequence, version))
        lane.sequence, lane.version = lane.sequence + 1, None


class Trainer:
    """A trainer's loop, which publishes once for each round, and saves before that."""

    def __init__(self, max_lag: int, saved: tuple[int, set[int], int]) -> None:
        done, beyond, self.version = saved
        self.source = RolloutPeer(ReceiverSession(TOKEN, done))
        self.source.beyond = beyond
        self.rounds = Rounds(max_lag, "pace", batches=Batches(), prefetch=0)
        self.holds: list[ArrivedItem] = []
        self.has_published = True

    def meet(self, lanes: int, aside: dict[int, int]) -> None:
        """Take a hello."""
        self.source.introduce(replace(UNKNOWN, aside=[*aside.items()]), lanes)
        self.rounds.widen(self.source)
        self.source.life = PeerLife.HERE
        self.is_first = True

    def take(self, message: Any) -> None:
        """Take what has come."""
        if isinstance(message, tuple):
            number, piece = message
            self.source.session.take(number, may_skip=self.is_first)
            self.is_first = False
            self.rounds.waiting = self.rounds.joined([ArrivedItem(self.source, number, piece, piece.version)])
        else:
            self.source.set_aside(*message["left"])

    def publish(self) -> None:
        if self.holds and not self.has_published:
            self.version, self.has_published = self.version + 1, True

    def ask(self) -> list[ArrivedItem]:
        """Be done with the round before, and have the next where that is whole."""
        for arrived in self.holds:
            self.source.move_on(arrived.number)
            self.source.keep()
        self.rounds.begin(lambda: [self.source], self.version)
        self.rounds.take(lambda: [self.source])
        self.holds, self.rounds.taken = self.rounds.taken, []
        self.has_published = False
        return self.holds

    def saved(self) -> tuple[int, set[int], int]:
        """Return the state from which a trainer goes on that is started now and publishes before its loop begins."""
        done, beyond = self.source.session.done, self.source.beyond | {arrived.number for arrived in self.holds}
        while done + 1 in beyond:
            done += 1
        is_behind = bool(self.holds) and not self.has_published
        return done, {number for number in beyond if number > done}, self.version + is_behind


class World:
    """Both, and what is between them."""

    def __init__(self, lanes: int, max_lag: int) -> None:
        self.rollout, self.trainer = Rollout(lanes), Trainer(max_lag, (0, set(), 1))
        self.lanes, self.max_lag, self.handed = lanes, max_lag, dict[int, int]()
        self.up: deque[Any] = deque()
        self.down: deque[Any] = deque()
        self.told: list[Any] = []
        self.count = 0
        self.cut()

    def cut(self) -> None:
        """Lose a connection, and make another one."""
        self.up.clear()
        self.down.clear()
        session = self.rollout.session
        self.trainer.meet(self.lanes, self.rollout.gate.aside)
        self.rollout.next = max(self.trainer.source.session.taken, session.kept) + 1
        session.done, self.told = session.kept, [None, None, None]

    def restart(self) -> None:
        """Lose the trainer, and start another one from what it has saved."""
        self.trainer = Trainer(self.max_lag, self.trainer.saved())
        self.cut()

    def send(self) -> None:
        """Have both ends send something."""
        rollout = self.rollout
        while rollout.to_tell:
            self.up.append(rollout.to_tell.popleft())
        if rollout.next <= min(rollout.session.given, rollout.session.done + rollout.session.window):
            self.up.append((rollout.next, rollout.pieces[rollout.next - 1]))
            rollout.next += 1
        source, version = self.trainer.source, self.trainer.version
        wants = source.session.window, source.is_awaited
        done = source.session.done, source.session.kept
        for place, (now, message) in enumerate(
            ((wants, self.trainer.rounds.order(source, version)), (version, version), (done, done))
        ):
            if self.told[place] != now:
                self.told[place] = now
                self.down.append(message)

    def arrive_up(self) -> None:
        if self.up:
            self.trainer.take(self.up.popleft())

    def arrive_down(self) -> None:
        if not self.down:
            return
        message, rollout = self.down.popleft(), self.rollout
        if isinstance(message, dict):
            rollout.session.take_order(message)
        elif isinstance(message, int):
            rollout.version = max(rollout.version, message)
        else:
            rollout.session.take(Done(*message))

    def ask(self) -> None:
        """The trainer asks for the next round, which is as it should be."""
        pieces = [arrived.item for arrived in self.trainer.ask() if not arrived.is_left_out]
        assert len({piece.lane for piece in pieces}) == len(pieces)
        for piece in pieces:
            assert isinstance(piece, Piece)
            assert piece.version is not None
            assert piece.version >= self.trainer.version - self.max_lag
            assert piece.sequence == self.handed.get(piece.lane, 0)
            self.handed[piece.lane] = piece.sequence + 1
        self.count += bool(pieces)

    def everything_goes_on(self) -> None:
        """Have all that there is do something."""
        rollout = self.rollout
        for place in range(4):
            rollout.work(place)
            rollout.give()
        for act in (self.send, *[self.arrive_up] * 2, *[self.arrive_down] * 2, self.trainer.publish):
            act()
        self.ask()


ACTS: dict[str, Callable[[World, int], None]] = {
    "work": lambda world, place: world.rollout.work(place),
    "give": lambda world, place: world.rollout.give(),
    "send": lambda world, place: world.send(),
    "arrive up": lambda world, place: world.arrive_up(),
    "arrive down": lambda world, place: world.arrive_down(),
    "publish": lambda world, place: world.trainer.publish(),
    "ask": lambda world, place: world.ask(),
    "go on": lambda world, place: world.everything_goes_on(),
    "lose": lambda world, place: world.rollout.lose(place),
    "cut": lambda world, place: world.cut(),
    "restart": lambda world, place: world.restart(),
}


@settings(max_examples=examples(80))
@given(
    lanes=st.integers(1, 4),
    max_lag=st.integers(0, 2),
    acts=st.lists(
        st.tuples(st.sampled_from([*ACTS, *["go on", "work", "give"] * 3]), st.integers(0, 3)),
        min_size=20,
        max_size=120,
    ),
)
def test_rounds_are_as_fresh_as_may_be_and_lose_nothing(lanes: int, max_lag: int, acts: list[tuple[str, int]]) -> None:
    world = World(lanes, max_lag)
    for act, place in acts:
        ACTS[act](world, place)
    begun = world.count
    for _ in range(60):
        world.everything_goes_on()
    assert not world.rollout.lanes or world.count >= begun + 3
    # All lanes go: what they have given is handed over, and nobody waits.
    for _ in range(150):
        for place in range(4):
            world.rollout.lose(place)
        world.everything_goes_on()
    assert not world.rollout.lanes
    given = [piece for piece in world.rollout.pieces if piece.num_steps]
    assert sum(world.handed.values()) == len(given)
    assert not world.rollout.under_way
