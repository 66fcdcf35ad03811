"""A gateway's end of a connection to a host."""

from rollflow.stream.errors import WireError
from rollflow.stream.wire.agent_rows import AgentRows
from rollflow.stream.wire.connection import Event, encoded
from rollflow.stream.wire.form import Form, form_of
from rollflow.stream.wire.gateway_end import GatewayEnd
from rollflow.stream.wire.handshake import Hello
from rollflow.stream.wire.limits import Limits
from rollflow.stream.wire.message import Message
from rollflow.stream.wire.running import (
    Answer,
    Credit,
    Cut,
    Metrics,
    Request,
    Reset,
    Rows,
    Settings,
    States,
    Step,
    Weights,
)
from rollflow.stream.wire.session import GatewaySession


class GatewayConnection(GatewayEnd):
    """A gateway's end.

    software    what runs here, for people
    nonce       32 random bytes, new for every connection
    secret      None: the gateway has none, and takes no host that has one
    credits     messages that nobody asked for which the host may still send
    hello       what the host is; None before it has proved itself

    Events: Hello, once the host has proved itself, which is to be answered with `welcome` or `refuse`; then Rows,
    AgentRows, Failed and Fragment, the answer to each request once, and Metrics; Goodbye; Broken.
    """

    def __init__(self, *, software: str, nonce: bytes, secret: bytes | None, limits: Limits, now: float) -> None:
        super().__init__(software=software, nonce=nonce, secret=secret, limits=limits, now=now)
        self.credits = 0
        self._form: Form | None = None
        self._session: GatewaySession | None = None

    def welcome(self, session: GatewaySession, *, credits: int = 0) -> None:
        """Take the host in, with the session that its Hello names, which is new or was there before.

        What was under way in the session is asked again, and its connection before this one is asked nothing more: it
        may be closed. Raises WireError where there is no Hello to answer, or the host is not what it was when the
        session began.
        """
        if session.is_welcomed and self.hello is not None:
            session.check_same(self.hello)
        self._welcome(session.token, resumed=session.is_welcomed, credits=credits, lanes=session.grants())
        self.credits = credits
        self._session = session
        session.is_welcomed = True
        session.send = self._queue_if_running
        for request in session.under_way:
            self._send(request, request.lane)

    def ask(self, request: Request) -> None:
        """Ask for something, under the lane's next number.

        It goes through whichever connection of the session is running. Where none is, it is asked by the next. Its
        arrays must stay as they are until the answer comes.

        Raises WireError where it does not fit the lane or the spaces, or is larger than the host takes: it is not
        asked then. A WireError with the code "undelivered" says that the connection is broken; the next one asks.
        """
        session, form = self._welcomed(request.kind)
        if isinstance(request, Reset | Step):
            request = form.check_request(request, session.slots_of(request.lane))
        buffers = encoded(request, self._peer_max_frame, self.peer)
        session.ask(request)
        assert session.send is not None
        session.send(buffers, request.lane)

    def give(self, count: int) -> None:
        """Let the host send so many messages more that nobody asked for. Raises WireError when not running."""
        self._check_running(Credit.kind)
        self._send(Credit(count))
        self.credits += count

    def tell(self, news: Settings | Weights | States | Cut) -> None:
        """Send settings, weights, states or a cut, whose arrays must stay as they are until sent.

        A cut of a turn that has been answered is not sent; none is sent again by the session's next connection.

        Raises WireError when not running, the host runs no rollouts, or a cut is of a turn that was not asked for.
        """
        self._check_running(news.kind)
        if self.hello is None or self.hello.role != "rollout":
            raise WireError(f"{news.kind}: not for a host of environments", "role")
        if isinstance(news, Cut) and not self._welcomed(news.kind)[0].cuts(news):
            return
        self._send(news)

    def _welcomed(self, what: str) -> tuple[GatewaySession, Form]:
        if self._session is None or self._form is None:
            raise WireError(f"{what}: the host has not been welcomed", "order")
        return self._session, self._form

    def _check(self, hello: Hello) -> None:
        self._form = form_of(hello)

    def _take_running(self, message: Message) -> list[Event]:
        if self._session is None:
            return []  # a goodbye has been said in the handshake
        if isinstance(message, Answer):
            return self._take_answer(message)
        if isinstance(message, Metrics):
            if not self.credits:
                raise WireError("metrics without a credit, expected to wait for more", "credit")
            self.credits -= 1
            return [message]
        raise WireError(f"{message.kind} from a host, expected an answer or metrics", "order")

    def _take_answer(self, answer: Answer) -> list[Event]:
        session, form = self._welcomed(answer.kind)
        request = session.asked(answer)
        if request is None:
            return []
        if isinstance(answer, Rows | AgentRows) and isinstance(request, Reset | Step):
            answer = form.check_rows(answer, request, session.slots_of(answer.lane))
        session.take(answer)
        return [answer]
