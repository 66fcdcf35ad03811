"""A host's end of a connection to a gateway."""

from rollflow.stream.errors import WireError
from rollflow.stream.wire.connection import Connection, Event, Phase, encoded
from rollflow.stream.wire.handshake import Challenge, Hello, Proof, Welcome
from rollflow.stream.wire.limits import MAX_HANDSHAKE_FRAME, Limits
from rollflow.stream.wire.message import Message
from rollflow.stream.wire.proof import GATEWAY, HOST, is_proof, prove, transcript_of
from rollflow.stream.wire.rows import RowForm
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


class HostConnection(Connection):
    """A host's end; its Hello is what it sends first.

    hello      its `session` is the token of `session`
    session    the host's memory, the same for one connection after another
    secret     None: the host has none
    credits    messages that nobody asked for which it may send
    is_busy    whether the host has another connection that was welcomed: a gateway that goes on with this session may
               replace that one, and any other is refused

    Events: Welcome; then Reset and Step, or Turn, each request once, with Settings, Weights and States between them,
    and Cut for a Turn that is not answered yet; Goodbye; Broken. Every request is to be answered with `answer`, those
    of different lanes in any order. Raises WireError where spaces are no spaces.
    """

    def __init__(self, hello: Hello, session: HostSession, *, secret: bytes | None, limits: Limits, now: float) -> None:
        super().__init__(limits, now, "gateway", min(limits.max_frame, MAX_HANDSHAKE_FRAME))
        if hello.session != session.token:
            raise WireError("hello.session is not the token of the session that it comes with", "session")
        self.credits = 0
        self.is_busy = False
        self._hello, self._session, self._secret = hello, session, secret
        self._form = RowForm.of(hello)
        self._transcript: bytes | None = None  # once the Challenge has come
        buffers = encoded(hello, MAX_HANDSHAKE_FRAME, self.peer)
        self._hello_frame = b"".join(buffers)
        self._queue(buffers)

    def answer(self, request: Request, answer: Answer) -> bool:
        """Answer a request; False: nobody waits for it any more, since another session has begun.

        It goes through whichever connection of the session is running. Where none is, it waits for the next. Its
        arrays must stay as they are until the lane's next request comes.

        Raises WireError where it does not fit the request or the spaces, or is larger than the gateway takes, and
        ColumnError where infos can't be sent: the request is not answered then. A WireError with the code "undelivered"
        says that the connection is broken; the answer waits for the next.
        """
        check_answer(request, answer)
        if not self._session.waits_for(request):
            return False
        if isinstance(answer, Rows) and isinstance(request, Reset | Step):
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

    def _take(self, message: Message, frame: bytearray) -> list[Event]:
        if self.phase is Phase.HANDSHAKE:
            return self._take_handshake(message, frame)
        if self.phase is Phase.LEAVING:
            return []  # nothing is taken any more
        match message:
            case Credit():
                self.credits += message.count
                return []
            case Reset() | Step() if self._hello.role == "env":
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

    def _take_handshake(self, message: Message, frame: bytearray) -> list[Event]:
        if isinstance(message, Challenge) and self._transcript is None:
            self._take_challenge(message, frame)
            return []
        if isinstance(message, Welcome) and self._transcript is not None:
            if not is_proof(message.mac, self._secret, GATEWAY, self._transcript):
                raise WireError("welcome.mac: the gateway does not know the secret", "secret")
            if self.is_busy and not message.resumed:
                raise WireError(
                    "the host is busy with another gateway, expected one that comes when it is free", "busy"
                )
            self._session.begin(message, self._hello)
            self._session.max_frame = self._peer_max_frame
            self._session.send = self._queue_if_running
            self._decoder.max_frame = self.limits.max_frame
            self.credits = message.credits
            self.phase = Phase.RUNNING
            return [message]
        expected = "challenge" if self._transcript is None else "welcome"
        raise WireError(f"{message.kind} in the handshake, expected {expected}", "order")

    def _take_challenge(self, challenge: Challenge, frame: bytearray) -> None:
        lowest, highest = self._hello.versions
        if not lowest <= challenge.version <= highest:
            raise WireError(f"challenge.version is {challenge.version}, expected {lowest} to {highest}", "version")
        if challenge.secret != (self._secret is not None):
            whose = ("the gateway asks for a secret", "this host has none")
            if self._secret is not None:
                whose = ("the gateway asks for no secret", "this host has one")
            raise WireError(f"{whose[0]}, and {whose[1]}: expected both to have the same, or both none", "secret")
        self._peer_max_frame = challenge.max_frame
        self._heartbeat_s = challenge.heartbeat_s
        self._transcript = transcript_of(self._hello_frame, bytes(frame))
        self._send(Proof(prove(self._secret, HOST, self._transcript)))
