"""What the ends of connections have in common that others introduce themselves to: gateways and trainers."""

from rollflow.stream.errors import WireError
from rollflow.stream.wire.connection import Connection, Event, Phase, encoded
from rollflow.stream.wire.frame import Frame
from rollflow.stream.wire.handshake import VERSION, Challenge, Hello, LaneGrant, Proof, Welcome
from rollflow.stream.wire.limits import MAX_HANDSHAKE_FRAME, Limits
from rollflow.stream.wire.message import Message
from rollflow.stream.wire.proof import GATEWAY, HOST, is_proof, prove, transcript_of


class GatewayEnd(Connection):
    """An end that waits for a Hello, and for the proof that whoever says it knows the secret.

    software    what runs here, for people
    nonce       32 random bytes, new for every connection
    secret      None: this end has none, and takes nobody who has one
    hello       what the other end is; None before it has proved itself
    """

    roles = "gateway", "host"

    def __init__(self, *, software: str, nonce: bytes, secret: bytes | None, limits: Limits, now: float) -> None:
        super().__init__(limits, now, min(limits.max_frame, MAX_HANDSHAKE_FRAME))
        self.hello: Hello | None = None
        self._software, self._nonce, self._secret = software, nonce, secret
        self._said: Hello | None = None  # by somebody who has not proved itself
        self._transcript = b""

    # What those add who are made of this

    def _check(self, hello: Hello) -> None:
        """Raise WireError for a Hello that can't be taken, now that its sender has proved itself."""
        raise NotImplementedError

    def _take_running(self, message: Message) -> list[Event]:
        """What a message comes to once the handshake is over. Raises WireError where it must not come."""
        raise NotImplementedError

    # Inside

    def _welcome(self, token: bytes, *, resumed: bool, credits: int, lanes: tuple[LaneGrant, ...]) -> None:
        """Answer the Hello. Raises WireError where there is none to answer, or its session is another."""
        if self.phase is not Phase.HANDSHAKE or self.hello is None:
            raise WireError(f"welcome: no {self.roles[1]} waits for it", "order")
        if self.hello.session != token:
            raise WireError(f"welcome: the session is not the one that the {self.roles[1]} named", "session")
        mac = prove(self._secret, GATEWAY, self._transcript)
        self._send(Welcome(mac, token, resumed, credits, lanes))
        self.phase = Phase.RUNNING
        self._decoder.max_frame = self.limits.max_frame

    def _take(self, message: Message, frame: Frame) -> list[Event]:
        if self.phase is Phase.HANDSHAKE:
            return self._take_handshake(message, frame)
        return self._take_running(message)

    def _take_handshake(self, message: Message, frame: Frame) -> list[Event]:
        if isinstance(message, Hello) and self._said is None:
            self._take_hello(message, frame)
            return []
        if isinstance(message, Proof) and self._said is not None and self.hello is None:
            if not is_proof(message.mac, self._secret, HOST, self._transcript):
                me, other = self.roles
                told = "proves no secret" if self._secret is not None else f"proves a secret, and this {me} has none"
                if self._secret is not None and message.mac:
                    told = "has another secret, or somebody has changed what it said"
                raise WireError(f"proof.mac: the {other} {told}", "secret")
            self._check(self._said)  # not before: a space may take more memory than its description
            self.hello = self._said
            return [self.hello]
        expected = "hello" if self._said is None else "proof" if self.hello is None else "nothing before the welcome"
        raise WireError(f"{message.kind} in the handshake, expected {expected}", "order")

    def _take_hello(self, hello: Hello, frame: Frame) -> None:
        self.peer = f"{self.roles[1]} {hello.name!r}"
        lowest, highest = hello.versions
        if not lowest <= VERSION <= highest:
            raise WireError(f"hello.versions is {lowest} to {highest}, expected some with {VERSION}", "version")
        if not hello.slots:
            raise WireError("hello.slots is empty, expected the environments of at least one lane", "message")
        self._said = hello
        self._peer_max_frame = hello.max_frame
        challenge = Challenge(
            VERSION,
            self._software,
            self._nonce,
            self._secret is not None,
            self.limits.max_frame,
            self.limits.heartbeat_s,
            self.limits.grace_s,
        )
        buffers = encoded(challenge, hello.max_frame, self.peer)
        self._transcript = transcript_of(bytes(frame), b"".join(buffers))
        self._queue(buffers)
