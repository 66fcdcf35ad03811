"""The reliable session, of every family: each item is taken once and answered once, whatever breaks or begins anew."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from property_examples import examples
from wire_ends import taken_from
from wire_messages import GATEWAY_NONCE, SECRET, first_rows, hello, rows

from rollflow.stream import wire
from rollflow.stream.data.errors import WireError
from rollflow.stream.wire import ConnectionPhase

ALL = 1 << 20  # bytes
SOME = st.integers(0, 700) | st.just(0) | st.just(ALL)
SHARED: dict[str, Any] = {"secret": SECRET, "limits": wire.Limits(), "now": 0.0}
Told = tuple[str, int, int, Any]  # "item" or "answer", its lane, its number, and what it says


class Line:
    """A connection, and the bytes that are on their way to each of its ends."""

    def __init__(self, initiator: Any, acceptor: Any) -> None:
        self.initiator, self.acceptor = initiator, acceptor
        self.on_the_way = {True: b"", False: b""}

    def carry(self, to_acceptor: bool, count: int) -> list[Any]:
        """The events of so many bytes that one end gets."""
        sender, taker = (self.initiator, self.acceptor) if to_acceptor else (self.acceptor, self.initiator)
        data = self.on_the_way[to_acceptor] + taken_from(sender)
        self.on_the_way[to_acceptor] = data[count:]
        events: list[Any] = taker.receive(data[:count], 0.0)
        return events


class Hosts:
    """A gateway asks, and a host answers: one request of a lane at a time."""

    lanes, window, accepts, in_order = (0, 1), 1, None, False

    def __init__(self, epoch: int) -> None:
        role = "rollout" if epoch % 2 else "env"
        self.said = hello(role=role, session=bytes([epoch % 256]) * 16)
        self.host = wire.HostSession(self.said.session)
        self.gateway: wire.GatewaySession | None = None
        self.failed: set[int] = set()

    def initiator(self) -> Any:
        return wire.HostConnection(self.said, self.host, **SHARED)

    def welcome(self, acceptor: Any, said: wire.Hello) -> None:
        self.gateway = self.gateway or wire.GatewaySession(said.session, said, self.lanes, (0, 2))
        acceptor.welcome(self.gateway)

    def may_ask(self, lane: int) -> bool:
        return self.gateway is not None and all(each.lane != lane for each in self.gateway.under_way)

    def ask(self, line: Line, lane: int, number: int, salt: int) -> None:
        assert self.gateway is not None
        request: wire.Request = wire.Step(lane, number, np.array([salt % 2, salt // 2 % 2]))
        if self.said.role == "rollout":
            request = wire.Turn(lane, number, salt)
        elif number == 1 or lane in self.failed:
            self.failed.discard(lane)
            request = wire.Reset(lane, number, (salt, salt), None)
        ask = line.acceptor.ask if line.acceptor.session is not None else self.gateway.ask
        ask(request)

    def answer(self, line: Line, request: Any, says: float) -> None:
        obs = np.full((2, 3), says, np.float32)
        answer: Any = wire.Failed.of(request, ValueError(str(says)))
        if says % 5 == 0:
            self.failed.add(request.lane)
        elif isinstance(request, wire.Turn):
            answer = wire.Fragment(request.lane, request.number, {"obs": obs}, {})
        else:
            make = first_rows if isinstance(request, wire.Reset) else rows
            answer = make(lane=request.lane, number=request.number, obs=obs)
        line.initiator.answer(request, answer)

    def told(self, event: Any) -> Told:
        match event:
            case wire.Step():
                return "item", event.lane, event.number, event.actions.tolist()
            case wire.Reset():
                return "item", event.lane, event.number, event.seeds
            case wire.Turn():
                return "item", event.lane, event.number, event.step
            case wire.Failed():
                return "answer", event.lane, event.number, float(event.text)
            case wire.Fragment():
                return "answer", event.lane, event.number, float(event.columns["obs"][0, 0])
            case _:
                return "answer", event.lane, event.number, float(event.obs[0, 0])

    def says(self, told: Any, salt: int) -> bool:
        return bool(told in (salt, (salt, salt), [salt % 2, salt // 2 % 2]))

    def pump(self, line: Line) -> None:
        pass

    @property
    def kept(self) -> Iterator[int]:
        yield 0 if self.gateway is None else len(self.gateway.under_way) // len(self.lanes)


class Streams:
    """A source sends, and a trainer is done with what came, up to some number."""

    lanes, window, accepts, in_order = (0,), 3, "source", True

    def __init__(self, epoch: int) -> None:
        self.said = hello(role="source", slots=(1,), session=bytes([epoch % 256]) * 16)
        self.source = wire.SenderSession(self.said.session)
        self.items: dict[int, wire.Fragment] = {}
        self._know(0)

    def _know(self, taken: int) -> None:
        self.trainer = wire.ReceiverSession(self.said.session, taken)
        self.trainer.window = self.window

    def initiator(self) -> Any:
        return wire.SenderConnection(self.said, self.source, **SHARED)

    def welcome(self, acceptor: Any, said: wire.Hello) -> None:
        acceptor.welcome(self.trainer)
        acceptor.tell(wire.Done(self.trainer.done, self.trainer.kept))

    def may_ask(self, lane: int) -> bool:
        return len(self.items) < self.window

    def ask(self, line: Line, lane: int, number: int, salt: int) -> None:
        self.source.given = number
        self.items[number] = wire.Fragment(lane, number, {}, {"says": salt})

    def pump(self, line: Line) -> None:
        source, connection = self.source, line.initiator
        while connection.phase is ConnectionPhase.RUNNING:
            if connection.next > min(source.given, source.done + self.window):
                break
            connection.send(self.items[connection.next])

    def answer(self, line: Line, item: wire.Fragment, says: float) -> None:
        self.trainer.done = item.number
        self.trainer.kept = max(self.trainer.kept, item.number - int(says) % 2)
        if line.acceptor.phase is ConnectionPhase.RUNNING:
            line.acceptor.tell(wire.Done(self.trainer.done, self.trainer.kept))

    def told(self, event: Any) -> Told:
        if isinstance(event, wire.Fragment):
            return "item", event.lane, event.number, event.rest["says"]
        self.source.take(event)
        for number in [number for number in self.items if number <= self.source.kept]:
            del self.items[number]
        return "answer", 0, self.source.kept, None

    def says(self, told: Any, salt: int) -> bool:
        return bool(told == salt)

    def begin_answerer_anew(self, back: int) -> None:
        self._know(max(self.trainer.kept, self.trainer.done - back))  # which it has saved

    @property
    def kept(self) -> Iterator[int]:
        yield len(self.items)
        yield self.trainer.taken - self.trainer.done


class Queries:
    """A client asks, and a server answers, in any order."""

    lanes, window, accepts, in_order = (0,), 4, "sampler", False

    def __init__(self, epoch: int) -> None:
        self.said = hello(role="sampler", slots=(1,), session=bytes([epoch % 256]) * 16)
        self.client = wire.SenderSession(self.said.session)
        self.server = wire.ReceiverSession(self.said.session, window=self.window)

    def initiator(self) -> Any:
        return wire.SenderConnection(self.said, self.client, **SHARED)

    def welcome(self, acceptor: Any, said: wire.Hello) -> None:
        acceptor.welcome(self.server, credits=self.window)

    def may_ask(self, lane: int) -> bool:
        return self.client.may_ask

    def ask(self, line: Line, lane: int, number: int, salt: int) -> None:
        line.initiator.ask(self.client.query({}, {"says": salt}))

    def answer(self, line: Line, query: wire.Fragment, says: float) -> None:
        if line.acceptor.session is not None:
            line.acceptor.answer(query.number, {}, {"answers": says})
        else:
            self.server.answers[query.number] = wire.Fragment(0, query.number, {}, {"answers": says})

    def told(self, event: Any) -> Told:
        if "says" in event.rest:
            return "item", 0, event.number, event.rest["says"]
        return "answer", 0, event.number, event.rest["answers"]

    def says(self, told: Any, salt: int) -> bool:
        return bool(told == salt)

    def begin_answerer_anew(self, back: int) -> None:
        self.server = wire.ReceiverSession(self.said.session, window=self.window)

    def pump(self, line: Line) -> None:
        pass

    @property
    def kept(self) -> Iterator[int]:
        yield len(self.client.queries)
        yield len(self.server.answers)


class Reliable(RuleBasedStateMachine):
    """Two ends of a session, and connections that delay, lose, and end at any byte; either end may begin anew.

    asked       by lane: what each item says, by its number
    taken       by lane: numbers of items that came to the answerer as it is now, in their order
    answered    by lane: numbers of answers that came
    working     items that are to be answered
    late        connections that one end has lost, and the other has not
    """

    def __init__(self, family: Any) -> None:
        super().__init__()
        self.family, self.epoch = family, 0
        self.begin_both_anew()
        self.carry_all()

    def begin_both_anew(self) -> None:
        self.epoch += 1
        self.ends = self.family(self.epoch)
        self.asked: dict[int, dict[int, int]] = {lane: {} for lane in self.ends.lanes}
        self.taken: dict[int, list[int]] = {lane: [] for lane in self.ends.lanes}
        self.answered: dict[int, list[int]] = {lane: [] for lane in self.ends.lanes}
        self.working: list[Any] = []
        self.late: list[Line] = []
        self.connect()

    def connect(self) -> None:
        accepts = self.family.accepts
        make = partial(wire.ReceiverConnection, accepts=accepts) if accepts else wire.GatewayConnection
        acceptor = make(software="rollflow 0.1", nonce=GATEWAY_NONCE, **SHARED)
        self.line = Line(self.ends.initiator(), acceptor)

    @rule(lane=st.integers(0, 1), salt=st.integers(0, 30))
    def ask(self, lane: int, salt: int) -> None:
        lane %= len(self.ends.lanes)
        if self.ends.may_ask(lane):
            number = len(self.asked[lane]) + 1
            self.asked[lane][number] = salt
            self.ends.ask(self.line, lane, number, salt)
            self.ends.pump(self.line)

    @rule(rounds=st.integers(1, 3), salt=st.integers(0, 30))
    def go_on(self, rounds: int, salt: int) -> None:
        """Ask for something, and answer it."""
        for _ in range(rounds):
            self.ask(salt, salt)
            self.carry_all()
            while self.working:
                self.answer(0)
            self.carry_all()

    @precondition(lambda self: self.working)
    @rule(which=st.integers(0, 3))
    def answer(self, which: int) -> None:
        item = self.working.pop(0 if self.ends.in_order else which % len(self.working))
        self.ends.answer(self.line, item, float(item.number + 10 * getattr(item, "lane", 0)))

    @rule(to_acceptor=st.booleans(), count=SOME)
    def carry(self, to_acceptor: bool, count: int) -> None:
        self.take(self.line, self.line.carry(to_acceptor, count), to_acceptor)

    @rule()
    def carry_all(self) -> None:
        for _ in range(3):
            self.carry(True, ALL)
            self.carry(False, ALL)

    @rule(initiator_first=st.booleans(), lost=SOME, greets=st.booleans())
    def cut(self, initiator_first: bool, lost: int, greets: bool) -> None:
        """One end loses the connection; the other gets what is on its way, but for the last bytes, or not yet."""
        old, late = self.line, initiator_first
        data = old.on_the_way[late] + taken_from(old.initiator if late else old.acceptor)
        old.on_the_way[late] = data[: max(0, len(data) - lost)]
        events = old.initiator.ended() if late else old.acceptor.ended()
        assert all(isinstance(event, WireError) for event in events)
        if late:
            self.late.append(old)
        else:
            self.take(old, old.initiator.receive(old.on_the_way[False], 0.0), False)
            old.initiator.ended()
        self.connect()
        if greets:
            self.carry_all()

    @precondition(lambda self: self.late)
    @rule(count=SOME, ends=st.booleans())
    def carry_late(self, count: int, ends: bool) -> None:
        line = self.late[0]
        data, line.on_the_way[True] = line.on_the_way[True][:count], line.on_the_way[True][count:]
        self.take(line, line.acceptor.receive(data, 0.0), True)
        if (ends or not data) and line in self.late:
            self.late.remove(line)
            line.acceptor.ended()

    @rule(by_initiator=st.booleans())
    def say_goodbye(self, by_initiator: bool) -> None:
        """An end leaves in good order; what was sent before that arrives."""
        leaver, other = (self.line.initiator, self.line.acceptor)[:: 1 if by_initiator else -1]
        if leaver.phase is not ConnectionPhase.RUNNING or other.phase is not ConnectionPhase.RUNNING:
            return
        leaver.goodbye("it leaves")
        self.carry(by_initiator, ALL)
        assert other.phase is ConnectionPhase.ENDED
        self.connect()

    @precondition(lambda self: any(self.taken.values()))
    @rule(asker=st.sampled_from([False, False, True]), back=st.integers(0, 2))
    def begin_anew(self, asker: bool, back: int) -> None:
        """One end is started again; a host that is still there finds a gateway that does not know it."""
        known = self.ends
        if asker or self.family is Hosts:
            self.begin_both_anew()
            if asker and self.family is Hosts:
                self.ends.host, self.ends.said = known.host, known.said
        else:
            self.ends.begin_answerer_anew(back)
            self.working, self.late = [], []
            self.taken = {0: [*range(1, self.ends.trainer.done + 1)] if self.family is Streams else []}
        self.connect()
        self.carry_all()

    @invariant()
    def each_comes_once_in_order_and_no_more_is_kept_than_the_window(self) -> None:
        for lane, asked in self.asked.items():
            taken, answered = self.taken[lane], self.answered[lane]
            assert len(set(taken)) == len(taken)
            assert taken == sorted(taken)
            assert set(answered) <= asked.keys()
            if self.family is not Queries:
                assert taken == list(range(1, len(taken) + 1))
                assert answered == sorted(answered)
            assert self.family is Streams or len(set(answered)) == len(answered)
        assert all(kept <= self.ends.window for kept in self.ends.kept)

    def teardown(self) -> None:
        """A connection that holds brings everything to its end."""
        self.connect()
        for _ in range(8):
            self.carry_all()
            while self.working:
                self.answer(0)
        self.carry_all()
        self.each_comes_once_in_order_and_no_more_is_kept_than_the_window()
        for lane, asked in self.asked.items():
            if self.family is Streams:
                assert self.taken[lane] == list(asked)
                assert self.ends.source.done == len(asked)
            else:
                assert sorted(self.answered[lane]) == list(asked)

    def take(self, line: Line, events: list[Any], by_acceptor: bool) -> None:
        for event in events:
            assert not isinstance(event, WireError), event
            if isinstance(event, wire.Hello):
                self.ends.welcome(line.acceptor, event)
                if self.family is not Hosts:
                    self.late.clear()  # their owner drops them now
            elif not isinstance(event, wire.Welcome | wire.Goodbye):
                kind, lane, number, told = self.ends.told(event)
                if kind == "item":
                    assert self.ends.says(told, self.asked[lane][number])
                    self.taken[lane].append(number)
                    self.working.append(event)
                elif number:
                    assert told in (None, number + 10 * lane)
                    self.answered[lane].append(number)
            self.ends.pump(self.line)


@pytest.mark.parametrize("family", [Hosts, Streams, Queries])
def test_each_item_is_taken_once_and_answered_once_whatever_breaks(family: Any) -> None:
    drawn = settings(max_examples=examples(200), stateful_step_count=40, deadline=None)
    run_state_machine_as_test(lambda: Reliable(family), settings=drawn)
