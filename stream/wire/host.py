"""A host's end of a connection to a gateway."""

from rollflow.stream.errors import WireError
from rollflow.stream.wire.agent_rows import AgentRows
from rollflow.stream.wire.connection import Event, encoded
from rollflow.stream.wire.form import form_of
from rollflow.stream.wire.handshake import Hello, Welcome
from rollflow.stream.wire.host_end import HostEnd
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
    Turn,
    Weights,
)
from rollflow.stream.wire.session import HostSession, Taken, check_answer


class HostConnection(HostEnd):
    """A host's end; its Hello is what it sends first.

    hello      its `session` is the token of `session`
    session    the host's memory, the same for one connection after another
    secret     None: the host has none
    credits    messages that nobody asked for which it may send
    is_busy    see `HostEnd`

    Events: Welcome; then Reset and Step, or Turn, each request once, with Settings, Weights and States between them,
    and Cut for a Turn that is not answered yet; Goodbye; Broken. Every request is to be answered with `answer`, those
    of different lanes in any order. Raises WireError where spaces are no spaces.
    """

    def __init__(self, hello: Hello, session: HostSession, *, secret: bytes | None, limits: Limits, now: float) -> None:
        super().__init__(hello, secret=secret, limits=limits, now=now)
        if hello.session != session.token:
            raise WireError("hello.session is not the token of the session that it comes with", "session")
        self.credits = 0
        self._session = session
        self._form = form_of(hello)

    def answer(self, request: Request, answer: Answer) -> bool:
        """Answer a request; False: nobody waits for it any more, since another session has begun.

        It goes through whichever connection of the session is running. Where none is, it waits for the next. Its
        arrays must stay as they are until the lane's next request comes.

        Raises WireError where it does not fit the request or the spaces, or is larger than the gateway takes, and
        ColumnError where infos can't be sent: the request is not answered then. A WireError with the code "undelivered"
        says that the connection is broken; the answer waits for the next.
        """
        check_answer(request, answer, self._hello.role)
        if not self._session.waits_for(request):
            return False
        if isinstance(answer, Rows | AgentRows) and isinstance(request, Reset | Step):
            self._form.check_rows(answer, request, self._session.slots_of(request.lane))
        buffers = encoded(answer, self._session.max_frame, self.peer)
        self._session.keep(answer)
        if self._session.send is not None:
            self._session.send(buffers, answer.lane)
        return True

    def tell(self, metrics: Metrics) -> None:
        """Send metrics, for a credit. Raises WireError where there is none left, or the connection is not running."""
        self._check_running(metrics.kind)
        if not self.credits:
            raise WireError("metrics: no credit left, expected to wait for more", "credit")
        self._send(metrics)
        self.credits -= 1

    def _begin(self, welcome: Welcome) -> None:
        self._session.begin(welcome, self._hello)
        self._session.max_frame = self._peer_max_frame
        self._session.send = self._queue_if_running
        self.credits = welcome.credits

    def _take_running(self, message: Message) -> list[Event]:
        match message:
            case Credit():
                self.credits += message.count
                return []
            case Reset() | Step() if self._hello.role in ("env", "agents"):
                request = self._form.check_request(message, self._session.slots_of(message.lane))
                return self._take_request(request)
            case Turn() if self._hello.role == "rollout":
                return self._take_request(message)
            case Settings() | Weights() | States() if self._hello.role == "rollout":
                return [message]
            case Cut() if self._hello.role == "rollout":
                return [message] if self._session.cuts(message) else []
            case _:
                raise WireError(f"{message.kind} to a host of role {self._hello.role}", "order")

    def _take_request(self, request: Request) -> list[Event]:
        taken = self._session.take(request)
        if taken is Taken.AGAIN:
            answer = self._session.answer_to(request)
            self._send(answer, answer.lane)
        return [request] if taken is Taken.NEW else []
