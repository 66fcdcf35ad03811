"""The two ends of a handshake: initiators send the first Hello, acceptors wait for it."""

import secrets
from typing import Any

from rollflow.stream.data.errors import WireError
from rollflow.stream.wire.codec import handshake
from rollflow.stream.wire.codec.frame import Frame
from rollflow.stream.wire.codec.limits import MAX_HANDSHAKE_FRAME, Limits
from rollflow.stream.wire.codec.message import Message
from rollflow.stream.wire.connection import Connection, ConnectionPhase, Event, encoded
from rollflow.stream.wire.software import software as this_software

_ROLES = {"source": ("rollout", "trainer"), "sampler": ("sampler", "replay host")}  # role in a Hello -> both ends


class Initiator(Connection):
    """An end whose Hello is the first message of the connection.

    hello      describes this end, with the token of `session` as its `session`
    session    this end's memory, the same for one connection after another
    secret     shared secret; None: this end has none
    is_busy    whether this end has another welcomed connection: only a gateway that resumes its session may
               replace that one, and any other is refused
    """

    roles = "host", "gateway"

    def __init__(
        self, hello: handshake.Hello, session: Any, *, secret: bytes | None, limits: Limits, now: float
    ) -> None:
        self.roles = _ROLES.get(hello.role, self.roles)
        super().__init__(limits, now, min(limits.max_frame, MAX_HANDSHAKE_FRAME))
        assert hello.session == session.token
        self.session = session
        self.is_busy = False
        self._hello, self._secret = hello, secret
        self._transcript: bytes | None = None  # once the Challenge has come
        buffers = encoded(hello, MAX_HANDSHAKE_FRAME, self.peer)
        self._hello_frame = b"".join(buffers)
        self._queue(buffers)

    # To be defined by subclasses

    def _begin(self, welcome: handshake.Welcome) -> None:
        """Take a Welcome whose sender knows the secret. Raises WireError if it does not fit."""
        raise NotImplementedError

    # Inside

    def _take(self, message: Message, frame: Frame) -> list[Event]:
        # Messages after our Goodbye are ignored.
        return [] if self.phase is ConnectionPhase.LEAVING else super()._take(message, frame)

    def _take_handshake(self, message: Message, frame: Frame) -> list[Event]:
        if isinstance(message, handshake.Challenge) and self._transcript is None:
            self._take_challenge(message, frame)
            return []
        if isinstance(message, handshake.Welcome) and self._transcript is not None:
            if not handshake.is_proof(message.mac, self._secret, handshake.GATEWAY, self._transcript):
                raise WireError(f"welcome.mac: the {self.roles[1]} does not know the secret", "secret")
            if self.is_busy and not message.resumed:
                raise WireError(
                    "the host is busy with another gateway, expected one that comes when it is free", "busy"
                )
            if message.session != self._hello.session:
                raise WireError("welcome.session is not the one in the hello", "session")
            self._begin(message)
            self._decoder.widen(self.limits.max_frame)
            self.phase = ConnectionPhase.RUNNING
            return [message]
        expected = "challenge" if self._transcript is None else "welcome"
        raise WireError(f"{message.kind} in the handshake, expected {expected}", "order")

    def _take_challenge(self, challenge: handshake.Challenge, frame: Frame) -> None:
        lowest, highest = self._hello.versions
        if not lowest <= challenge.version <= highest:
            raise WireError(f"challenge.version is {challenge.version}, expected {lowest} to {highest}", "version")
        if challenge.secret != (self._secret is not None):
            me, other = self.roles
            asked, own = ("a secret", "none") if self._secret is None else ("no secret", "one")
            raise WireError(
                f"the {other} asks for {asked}, and this {me} has {own}: expected both to have the same, or both none",
                "secret",
            )
        self.peer_max_frame = challenge.max_frame
        self._heartbeat_s = challenge.heartbeat_s
        self._transcript = handshake.transcript_of(self._hello_frame, bytes(frame))
        self._send(handshake.Proof(handshake.prove(self._secret, handshake.HOST, self._transcript)))


class Acceptor(Connection):
    """An end that waits for a Hello, and for the proof that its sender knows the secret.

    accepts     role of a Hello that this end accepts; None: `_check` says so
    software    name of the software at this end, for people; None: this software
    nonce       32 random bytes, new for every connection; None: some are drawn
    secret      shared secret; None: this end has none, and refuses a peer that has one
    hello       the other end's Hello; None before its proof has come
    session     this end's memory of the other one; None before it is welcomed
    """

    roles = "gateway", "host"
    session: Any = None

    def __init__(
        self,
        *,
        secret: bytes | None,
        limits: Limits,
        now: float,
        accepts: str | None = None,
        software: str | None = None,
        nonce: bytes | None = None,
    ) -> None:
        self.accepts = accepts
        self.roles = self.roles if accepts is None else _ROLES[accepts][::-1]
        super().__init__(limits, now, min(limits.max_frame, MAX_HANDSHAKE_FRAME))
        self.hello: handshake.Hello | None = None
        self._software, self._secret = software or this_software(), secret
        self._nonce = nonce or secrets.token_bytes(handshake.NONCE_BYTES)
        self._unproved: handshake.Hello | None = None  # a Hello whose sender may not know the secret
        self._transcript = b""

    def welcome(self, session: Any, *, credits: int = 0) -> None:
        """Welcome the other end, with the new or earlier session that its Hello names.

        Raises WireError if there is no Hello to answer, or it names another session.
        """
        if self.phase is not ConnectionPhase.HANDSHAKE or self.hello is None:
            raise WireError(f"welcome: no {self.roles[1]} waits for it", "order")
        if self.hello.session != session.token:
            raise WireError(f"welcome: the session is not the one that the {self.roles[1]} named", "session")
        mac = handshake.prove(self._secret, handshake.GATEWAY, self._transcript)
        self._send(handshake.Welcome(mac, session.token, session.is_welcomed, credits, session.grants()))
        self.session, session.is_welcomed = session, True
        self.phase = ConnectionPhase.RUNNING
        self._decoder.widen(self.limits.max_frame)

    # Inside

    def _check(self, hello: handshake.Hello) -> None:
        """Raise WireError for a Hello that this end does not accept; its sender has proved itself."""
        if hello.role != self.accepts:
            raise WireError(
                f"hello.role is {hello.role!r}, expected {self.accepts!r}: this is a {self.roles[0]}", "role"
            )

    def _take(self, message: Message, frame: Frame) -> list[Event]:
        has_left = self.session is None and self.phase is not ConnectionPhase.HANDSHAKE  # in the handshake
        return [] if has_left else super()._take(message, frame)

    def _take_handshake(self, message: Message, frame: Frame) -> list[Event]:
        if isinstance(message, handshake.Hello) and self._unproved is None:
            self._take_hello(message, frame)
            return []
        if isinstance(message, handshake.Proof) and self._unproved is not None and self.hello is None:
            if not handshake.is_proof(message.mac, self._secret, handshake.HOST, self._transcript):
                me, other = self.roles
                reason = "proves no secret" if self._secret is not None else f"proves a secret, and this {me} has none"
                if self._secret is not None and message.mac:
                    reason = "has another secret, or somebody has changed what it said"
                raise WireError(f"proof.mac: the {other} {reason}", "secret")
            self._check_software(self._unproved)
            self._check(self._unproved)  # only now: a space may take far more memory than its description
            self.hello = self._unproved
            return [self.hello]
        expected = (
            "hello" if self._unproved is None else "proof" if self.hello is None else "nothing before the welcome"
        )
        raise WireError(f"{message.kind} in the handshake, expected {expected}", "order")

    def _check_software(self, hello: handshake.Hello) -> None:
        """Raise WireError for other software if all messages are its own: only hosts of environments may be any."""
        if hello.role not in ("env", "agents") and hello.software != self._software:
            raise WireError(
                f"hello.software is {hello.software!r}, expected {self._software!r}, as this {self.roles[0]} is",
                "version",
            )

    def _take_hello(self, hello: handshake.Hello, frame: Frame) -> None:
        self.peer = f"{self.roles[1]} {hello.name!r}"
        lowest, highest = hello.versions
        if not lowest <= handshake.VERSION <= highest:
            raise WireError(
                f"hello.versions is {lowest} to {highest}, expected some with {handshake.VERSION}", "version"
            )
        if not hello.slots:
            raise WireError("hello.slots is empty, expected the environments of at least one lane", "message")
        self._unproved = hello
        self.peer_max_frame = hello.max_frame
        challenge = handshake.Challenge(
            handshake.VERSION,
            self._software,
            self._nonce,
            self._secret is not None,
            self.limits.max_frame,
            self.limits.heartbeat_s,
            self.limits.grace_s,
        )
        buffers = encoded(challenge, hello.max_frame, self.peer)
        self._transcript = handshake.transcript_of(bytes(frame), b"".join(buffers))
        self._queue(buffers)
