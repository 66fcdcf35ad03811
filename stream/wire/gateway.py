"""Connections between a gateway and hosts of environments or of whole rollouts."""

from typing import Any

from rollflow.stream.data.errors import WireError
from rollflow.stream.wire.codec import messages
from rollflow.stream.wire.codec.handshake import NO_HOSTS, ROLLOUTS, Hello, Welcome
from rollflow.stream.wire.codec.limits import Limits
from rollflow.stream.wire.codec.message import Message
from rollflow.stream.wire.codec.messages import AgentRows
from rollflow.stream.wire.connection import Event, encoded
from rollflow.stream.wire.ends import Acceptor, Initiator
from rollflow.stream.wire.session import GatewaySession, HostSession, check_answer, form_of


class HostConnection(Initiator):
    """A host's end. Constructed as an `Initiator`.

    Events:

        Welcome                     the gateway has accepted the host
        Reset, Step or Turn         each request once: answer with `answer`, different lanes in any order
        Settings, Weights, States   between the requests of a rollout host
        Cut                         a Turn that is not answered yet is to end now
        Goodbye, or an error        the end

    Raises WireError for invalid spaces in `hello`.
    """

    session: HostSession

    def __init__(self, hello: Hello, session: HostSession, *, secret: bytes | None, limits: Limits, now: float) -> None:
        super().__init__(hello, session, secret=secret, limits=limits, now=now)
        self._form = form_of(hello)

    def answer(self, request: messages.Request, answer: messages.Answer) -> bool:
        """Answer a request; return False if another session has begun since, so that it needs no answer.

        The answer goes through the running connection of the session, or waits for the next one. Its arrays must not
        change until the lane's next request comes.

        Raises WireError if the answer does not fit the request or the spaces, or is larger than the gateway takes.
        Raises ColumnError for infos that can't be sent. The request is then not answered. A WireError with the code
        "undelivered" says that the connection is broken: the answer waits for the next one.
        """
        check_answer(request, answer, self._hello.role)
        if not self.session.waits_for(request):
            return False
        if isinstance(answer, messages.Rows | AgentRows) and isinstance(request, messages.Reset | messages.Step):
            self._form.check_rows(answer, request, self.session.slots_of(request.lane))
        buffers = encoded(answer, self.session.max_frame, self.peer)
        self.session.keep(answer)
        if self.session.send is not None:
            self.session.send(buffers, answer.lane)
        return True

    def _begin(self, welcome: Welcome) -> None:
        self.session.begin(welcome, self._hello)
        self.session.max_frame = self.peer_max_frame
        self.session.send = self._queue_if_running

    def _take_running(self, message: Message) -> list[Event]:
        match message:
            case messages.Reset() | messages.Step() if self._hello.role in ("env", "agents"):
                request = self._form.check_request(message, self.session.slots_of(message.lane))
                return self._take_request(request)
            case messages.Turn() if self._hello.role in ROLLOUTS:
                return self._take_request(message)
            case messages.Settings() | messages.Weights() | messages.States() if self._hello.role in ROLLOUTS:
                return [message]
            case messages.Cut() if self._hello.role in ROLLOUTS:
                return [message] if self.session.cuts(message) else []
            case _:
                raise WireError(f"{message.kind} to a host of role {self._hello.role}", "order")

    def _take_request(self, request: messages.Request) -> list[Event]:
        if self.session.take(request):
            return [request]
        if (answer := self.session.answer_to(request)) is not None:
            self._send(answer, answer.lane)
        return []


class GatewayConnection(Acceptor):
    """A gateway's end. Constructed as an `Acceptor`.

    Events:

        Hello                               the host has proved itself: answer with `welcome` or `refuse`
        Rows, AgentRows, Failed, Fragment   the answer to each request, once
        Metrics                             unrequested
        Goodbye, or an error                the end
    """

    _form: Any = None
    session: GatewaySession | None = None

    def welcome(self, session: GatewaySession, *, credits: int = 0) -> None:
        """Welcome the host, with the new or earlier session that its Hello names.

        Requests under way in the session are sent again. The session's connection before this one gets no more
        requests, and may be closed. Raises WireError if there is no Hello to answer, or the host is not the one with
        which the session began.
        """
        if session.is_welcomed and self.hello is not None:
            session.check_same(self.hello)
        super().welcome(session, credits=credits)
        session.send = self._queue_if_running
        for request in session.under_way:
            self._send(request, request.lane)

    def ask(self, request: messages.Request) -> None:
        """Send a request, under the lane's next number.

        It goes through the running connection of the session, or through the next one. Its arrays must not change
        until the answer comes.

        Raises WireError if the request does not fit the lane or the spaces, or is larger than the host takes. It is
        then not sent. A WireError with the code "undelivered" says that the connection is broken: the next one sends
        the request.
        """
        session, form = self._welcomed(request.kind)
        if isinstance(request, messages.Reset | messages.Step):
            request = form.check_request(request, session.slots_of(request.lane))
        buffers = encoded(request, self.peer_max_frame, self.peer)
        session.ask(request)
        assert session.send is not None
        session.send(buffers, request.lane)

    def tell(self, news: Message) -> None:
        """Send settings, weights, states or a cut, whose arrays must not change until they are sent.

        A cut of an answered turn is not sent. The session's next connection sends none of these again. Raises WireError
        if the connection is not running, or a cut is of a turn that was not requested.
        """
        self._check_running(news.kind)
        assert self.hello is not None
        assert self.hello.role in ROLLOUTS
        if not isinstance(news, messages.Cut) or self._welcomed(news.kind)[0].cuts(news):
            super().tell(news)

    def _welcomed(self, what: str) -> tuple[GatewaySession, Any]:
        if self.session is None or self._form is None:
            raise WireError(f"{what}: the host has not been welcomed", "order")
        return self.session, self._form

    def _check(self, hello: Hello) -> None:
        self._form = None if hello.role in NO_HOSTS else form_of(hello)  # such a role is refused by the owner

    def _take_running(self, message: Message) -> list[Event]:
        if isinstance(message, messages.Answer):
            return self._take_answer(message)
        if isinstance(message, messages.Metrics):
            return [message]
        raise WireError(f"{message.kind} from a host, expected an answer or metrics", "order")

    def _take_answer(self, answer: messages.Answer) -> list[Event]:
        session, form = self._welcomed(answer.kind)
        request = session.asked(answer)
        if request is None:
            return []
        if isinstance(answer, messages.Rows | AgentRows) and isinstance(request, messages.Reset | messages.Step):
            answer = form.check_rows(answer, request, session.slots_of(answer.lane))
        session.take(answer)
        return [answer]
