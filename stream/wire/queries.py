"""Connections between a sampler that asks and a replay host that answers, and their memories across connections.

A client numbers its requests 1, 2, … and may have several under way, which are answered in any order. After a lost
connection it sends those without an answer again. The server keeps its answers until the client says that it has them:
a request that it has taken before is not done again, but answered as it was. So every request is done once by a server
that remembers the client, and answered once.
"""

from collections.abc import Sequence

from rollflow.stream.data.errors import WireError
from rollflow.stream.wire.codec.handshake import LaneGrant, Welcome
from rollflow.stream.wire.codec.message import Message
from rollflow.stream.wire.codec.messages import Query, Result
from rollflow.stream.wire.connection import ConnectionPhase, Event, encoded
from rollflow.stream.wire.ends import Acceptor, Initiator
from rollflow.stream.wire.session import TakenRequest


class ClientSession:
    """A client's memory of its requests.

    token     16 random bytes that identify the session
    number    of the last request
    window    requests from the oldest without an answer on that may be asked; 0: no server has said so yet
    """

    def __init__(self, token: bytes) -> None:
        self.token = token
        self.number = self.window = 0
        self._under_way: dict[int, Query] = {}

    @property
    def under_way(self) -> Sequence[Query]:
        """The requests without an answer, in their order."""
        return list(self._under_way.values())

    @property
    def done(self) -> int:
        """Number of the last request such that it and all before are answered, or given up."""
        return next(iter(self._under_way), self.number + 1) - 1

    @property
    def may_ask(self) -> bool:
        """True if another request is within the window."""
        return self.number < self.done + self.window

    def ask(self, request: Query) -> None:
        """Record that a request is under way: the next one, within the window."""
        assert request.number == self.number + 1
        assert self.may_ask
        self.number = request.number
        self._under_way[request.number] = request

    def drop(self, number: int) -> bool:
        """Forget a request that was answered, or is given up; False: it is not under way."""
        return self._under_way.pop(number, None) is not None


class SamplerConnection(Initiator):
    """A sampler's end, with a Hello of role "sampler". Constructed as an `Initiator`.

    Events: Welcome, Results, each request's once, and at the end Goodbye or ConnectionBroken. Requests without an
    answer are sent again as soon as the Welcome has come.
    """

    roles = "sampler", "replay host"
    takes = (Result,)
    session: ClientSession

    def ask(self, request: Query) -> None:
        """Send a request, whose arrays must not change until it is answered; or have the next connection send it.

        Raises WireError for a request that is larger than the server takes; it is then not under way. A WireError with
        the code "undelivered" says that the connection is broken: the next one sends it.
        """
        buffers = encoded(request, self.peer_max_frame, self.peer)
        self.session.ask(request)
        if self.phase is ConnectionPhase.RUNNING:
            self._queue(buffers)

    def _begin(self, welcome: Welcome) -> None:
        if welcome.credits < 1:
            raise WireError("welcome.credits is 0, expected the requests that may be under way", "session")
        self.session.window = welcome.credits
        for request in self.session.under_way:
            self._send(request)

    def _take_running(self, message: Message) -> list[Event]:
        events = super()._take_running(message)
        assert isinstance(message, Result)
        if message.number > (most := self.session.number):
            raise WireError(f"{message.kind} {message.number}, expected at most {most}", "number")
        return events if self.session.drop(message.number) else []


class ServerSession:
    """A server's memory of one client.

    token     16 random bytes of the client that identify the session
    window    requests from the oldest without an answer on that the client may ask
    """

    def __init__(self, token: bytes, window: int) -> None:
        self.token, self.window = token, window
        self.is_welcomed = False
        self._done = 0
        self._under_way: set[int] = set()
        self._answers: dict[int, Result] = {}

    def grants(self) -> tuple[LaneGrant, ...]:
        """One lane, in the form of a Welcome."""
        return (LaneGrant(0, 1, 0, 0),)

    def take(self, request: Query) -> TakenRequest:
        """Take a request; return the reaction to it. Raises WireError if it is beyond the window."""
        number, done, kind = request.number, request.done, request.kind
        if done >= number:
            raise WireError(f"{kind}.done is {done}, expected less than {number}, its number", "number")
        if done > self._done:
            self._done = done
            for answered in [each for each in self._answers if each <= done]:
                del self._answers[answered]
        if number in self._answers:
            return TakenRequest.AGAIN
        if number <= self._done or number in self._under_way:
            return TakenRequest.KNOWN
        if number > self._done + self.window:
            most = self._done + self.window
            raise WireError(f"{kind} {number}, expected at most {most}: {self.window} beyond what is done", "credit")
        self._under_way.add(number)
        return TakenRequest.NEW

    def answer_to(self, number: int) -> Result:
        """The kept answer to a request."""
        return self._answers[number]

    def keep(self, answer: Result) -> None:
        """Keep the answer to a request until the client has it; of one that it has given up, nothing."""
        self._under_way.remove(answer.number)
        if answer.number > self._done:
            self._answers[answer.number] = answer


class ReplayConnection(Acceptor):
    """A replay host's end. Constructed as an `Acceptor`.

    Events:

        Hello                       the client has proved itself: answer with `welcome` or `refuse`
        Query                       each once: answer with `answer`, in any order
        Goodbye, ConnectionBroken   the end
    """

    roles = "replay host", "sampler"
    accepts = "sampler"
    takes = (Query,)
    session: ServerSession | None = None

    def answer(self, answer: Result) -> None:
        """Answer a request; a connection that does not run leaves the answer to the next one.

        Raises WireError if the answer is larger than the client takes: it is then not answered. A WireError with the
        code "undelivered" says that the connection is broken: the next one sends the answer.
        """
        assert self.session is not None
        buffers = encoded(answer, self.peer_max_frame, self.peer)
        self.session.keep(answer)
        if self.phase is ConnectionPhase.RUNNING:
            self._queue(buffers)

    def _take_running(self, message: Message) -> list[Event]:
        events = super()._take_running(message)
        assert isinstance(message, Query)
        assert self.session is not None
        taken = self.session.take(message)
        if taken is TakenRequest.AGAIN:
            self._send(self.session.answer_to(message.number))
        return events if taken is TakenRequest.NEW else []
