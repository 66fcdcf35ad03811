"""Connections that carry numbered items one way, and the memories of both ends across connections.

A sender numbers its items 1, 2, …: a source its fragments, whatever their lanes, for a trainer; a sampler its queries,
for a replay host. A receiver's Welcome has the number of the last item that it has got; the sender goes on after it. So
each is taken once, however often connections break. The answer to a query has its number; the receiver sends it through
every connection until the sender has said that it came.
"""

from collections.abc import Mapping
from typing import Any

from rollflow.stream.data.errors import WireError
from rollflow.stream.wire.codec import field, messages
from rollflow.stream.wire.codec.handshake import MOST_NUMBER, LaneGrant, Welcome
from rollflow.stream.wire.codec.message import Message
from rollflow.stream.wire.codec.messages import Fragment
from rollflow.stream.wire.connection import ConnectionPhase, Event, encoded
from rollflow.stream.wire.ends import Acceptor, Initiator

_NUMBER = field.whole(0, MOST_NUMBER)


class SenderSession:
    """A sender's memory.

    token      16 random bytes that identify the session
    given      number of the last item, sent or not
    done       number of the last item such that the receiver has moved on from it and all before
    kept       number of the last item such that the receiver never wants it or any before again
    window     how many items beyond `done` may be sent; 0: no receiver has said so yet
    queries    those without an answer by their numbers, in their order
    """

    def __init__(self, token: bytes) -> None:
        self.token = token
        self.given = self.done = self.kept = self.window = 0
        self.queries: dict[int, Fragment] = {}

    @property
    def may_ask(self) -> bool:
        """True if another query is within the window."""
        return self.given < self.done + self.window

    def take(self, done: messages.Done) -> None:
        """Record how far the receiver is; to be called when events before this one have been handled."""
        self.done, self.kept = max(self.done, done.number), max(self.kept, done.kept)

    def query(self, columns: Mapping[str, Any], rest: Mapping[str, Any]) -> Fragment:
        """The next query, which says that the answers up to `done` have come."""
        return Fragment(0, self.given + 1, columns, {**rest, "done": self.done})

    def ask(self, query: Fragment) -> None:
        """Record that a query is under way: the next one, within the window."""
        assert query.number == self.given + 1
        assert self.may_ask
        self.given = query.number
        self.queries[query.number] = query

    def drop(self, number: int) -> bool:
        """Forget a query that was answered, or is given up; False: it is not under way."""
        is_there = self.queries.pop(number, None) is not None
        self.done = self.kept = next(iter(self.queries), self.given + 1) - 1
        return is_there


class SenderConnection(Initiator):
    """A sender's end, with a Hello of role "source" or "sampler". Constructed as an `Initiator`.

    next       number of the item that is to be sent next, once the Welcome has come

    Events: Welcome; then Settings, Weights, and Done, which is for `SenderSession.take`; answers to queries, each once;
    at the end Goodbye or an error. Queries without an answer are sent again as soon as the Welcome has come.
    """

    session: SenderSession
    takes = messages.Settings, messages.Weights, messages.Done
    next = 0

    def send(self, item: Fragment) -> None:
        """Send the next item, whose arrays must not change until they are sent, or while they are lent.

        Raises WireError if it is larger than the receiver takes, or the connection is not running.
        """
        self._check_running(item.kind)
        assert self.next <= item.number <= self.session.given
        self._send(item)
        self.next = item.number + 1

    def ask(self, query: Fragment) -> None:
        """Send a query, whose arrays must not change until it is answered, or have the next connection send it.

        Raises WireError for a query that is larger than the receiver takes; it is then not under way. A WireError with
        the code "undelivered" says that the connection is broken: the next one sends it.
        """
        buffers = encoded(query, self.peer_max_frame, self.peer)
        self.session.ask(query)
        if self.phase is ConnectionPhase.RUNNING:
            self.next = query.number + 1
            self._queue(buffers)

    def _begin(self, welcome: Welcome) -> None:
        session = self.session
        if len(welcome.lanes) != 1:
            raise WireError(f"welcome.lanes has {len(welcome.lanes)} entries, expected 1, of the stream", "session")
        has = welcome.lanes[0].number
        if has > session.given:
            raise WireError(
                f"welcome.lanes: the {self.roles[1]} has {has} items of this stream, expected at most {session.given}",
                "session",
            )
        self.next = max(has, session.kept) + 1
        session.done = session.kept  # a restarted trainer may want later fragments again
        session.window = welcome.credits
        for query in [query for number, query in session.queries.items() if number >= self.next]:
            self._send(query)
            self.next = query.number + 1

    def _take_running(self, message: Message) -> list[Event]:
        if isinstance(message, messages.Done) and not message.kept <= message.number < self.next:
            raise WireError(
                f"done {message.number}, of which {message.kept} are kept, expected kept <= done < {self.next}, the "
                "next to be sent",
                "number",
            )
        if self._hello.role != "sampler":
            return super()._take_running(message)
        if not isinstance(message, Fragment) or message.number >= self.next:
            what = f"{message.kind} {getattr(message, 'number', '')}".rstrip()
            raise WireError(f"{what}, expected an answer to a query up to {self.next - 1}", "number")
        return [message] if self.session.drop(message.number) else []


class ReceiverSession:
    """A receiver's memory of one sender.

    token     16 random bytes of the sender that identify the session
    taken     number of the last item such that it and all before have come
    done      number of the last item such that the receiver has moved on from it and all before
    kept      number of the last item such that the receiver never wants it or any before again
    missed    number of skipped items, which the sender forgot for an earlier receiver
    goes_on   whether the receiver goes on from the state of another: then those before the first one are missed, too
    window    how many items beyond `done` the sender may send; None: any number
    answers   to queries by their numbers, which the sender may not have got
    """

    def __init__(self, token: bytes, taken: int = 0, window: int | None = None, *, goes_on: bool = False) -> None:
        self.token, self.window, self.goes_on = token, window, goes_on
        self.taken = self.done = self.kept = taken
        self.missed = 0
        self.answers: dict[int, Fragment] = {}
        self.is_welcomed = bool(taken)

    def grants(self) -> tuple[LaneGrant, ...]:
        """The stream in the form of a Welcome."""
        return (LaneGrant(0, 1, 0, self.taken),)

    def take(self, number: int, *, may_skip: bool) -> None:
        """Record an item. Raises WireError if it is not the next one, or beyond the window."""
        if number <= self.taken or (number > self.taken + 1 and not may_skip):
            raise WireError(f"fragment {number}, expected {self.taken + 1}", "number")
        skipped = number - self.taken - 1
        if skipped:
            self._miss(skipped)
            self.done, self.kept = max(self.done, number - 1), max(self.kept, number - 1)
        self._check_window(number)
        self.taken = number

    def take_query(self, number: int, done: int) -> None:
        """Record a query, by which the answers up to `done` have come; numbers whose answers had come are skipped."""
        if number <= max(self.taken, done):
            raise WireError(f"query {number} with done {done}, expected more than {max(self.taken, done)}", "number")
        self.done = max(self.done, done)
        self.answers = {number: answer for number, answer in self.answers.items() if number > done}
        self._check_window(number)
        self.taken = number

    def miss(self, last: int) -> None:
        """Record the last number of the stream: missing items up to it have gone to an earlier receiver."""
        if last > self.taken:
            self._miss(last - self.taken)
            self.taken = self.done = self.kept = last

    def _miss(self, count: int) -> None:
        if self.taken or self.goes_on:
            self.missed += count

    def _check_window(self, number: int) -> None:
        if self.window is not None and number > self.done + self.window:
            most = self.done + self.window
            raise WireError(
                f"fragment {number}, expected at most {most}: {self.window} beyond the last that is done", "credit"
            )


class ReceiverConnection(Acceptor):
    """A receiver's end, for a Hello of the role `accepts`. Constructed as an `Acceptor`.

    Events:

        Hello                       the sender has proved itself: answer with `welcome` or `refuse`
        Fragment                    the items of the stream, each once and in order
        Metrics                     what a source says beside them
        Goodbye, or an error        the end
    """

    takes = Fragment, messages.Metrics
    session: ReceiverSession | None = None
    _is_first = True  # the next item is the first of this connection

    def welcome(self, session: ReceiverSession, *, credits: int = 0) -> None:
        """Welcome the sender, as an `Acceptor` does, and send it the answers that it may not have got."""
        super().welcome(session, credits=credits)
        for answer in session.answers.values():
            self._send(answer)

    def answer(self, number: int, columns: Mapping[str, Any], rest: Mapping[str, Any]) -> None:
        """Answer a query; a connection that does not run leaves the answer to the next one.

        Raises WireError if the answer is larger than the sender takes: it is then not answered. A WireError with the
        code "undelivered" says that the connection is broken: the next one sends the answer.
        """
        assert self.session is not None
        answer = Fragment(0, number, columns, rest)
        buffers = encoded(answer, self.peer_max_frame, self.peer)
        if number > self.session.done:  # else the sender has given it up
            self.session.answers[number] = answer
        if self.phase is ConnectionPhase.RUNNING:
            self._queue(buffers)

    def _take_running(self, message: Message) -> list[Event]:
        if isinstance(message, Fragment):
            assert self.session is not None
            if self.accepts == "sampler":
                self.session.take_query(message.number, _NUMBER(message.rest.get("done"), "done"))
            else:
                self.session.take(message.number, may_skip=self._is_first)
            self._is_first = False
        return super()._take_running(message)
