"""What the ends of connections have in common that introduce themselves: hosts and sources."""

from rollflow.stream.errors import WireError
from rollflow.stream.wire.connection import Connection, Event, Phase, encoded
from rollflow.stream.wire.frame import Frame
from rollflow.stream.wire.handshake import Challenge, Hello, Proof, Welcome
from rollflow.stream.wire.limits import MAX_HANDSHAKE_FRAME, Limits
from rollflow.stream.wire.message import Message
from rollflow.stream.wire.proof import GATEWAY, HOST, is_proof, prove, transcript_of


class HostEnd(Connection):
    """An end whose Hello is the first thing that is sent.

    hello      what this end is
    secret     None: it has none
    is_busy    whether it has another connection that was welcomed: a gateway that goes on with this session may
               replace that one, and any other is refused
    """

    roles = "host", "gateway"

    def __init__(self, hello: Hello, *, secret: bytes | None, limits: Limits, now: float) -> None:
        super().__init__(limits, now, min(limits.max_frame, MAX_HANDSHAKE_FRAME))
        self.is_busy = False
        self._hello, self._secret = hello, secret
        self._transcript: bytes | None = None  # once the Challenge has come
        buffers = encoded(hello, MAX_HANDSHAKE_FRAME, self.peer)
        self._hello_frame = b"".join(buffers)
        self._queue(buffers)

    # What those add who are made of this

    def _begin(self, welcome: Welcome) -> None:
        """Take a Welcome whose sender knows the secret. Raises WireError where it does not fit."""
        raise NotImplementedError

    def _take_running(self, message: Message) -> list[Event]:
        """What a message comes to once the handshake is over. Raises WireError where it must not come."""
        raise NotImplementedError

    # Inside

    def _take(self, message: Message, frame: Frame) -> list[Event]:
        if self.phase is Phase.HANDSHAKE:
            return self._take_handshake(message, frame)
        if self.phase is Phase.LEAVING:
            return []  # nothing is taken any more
        return self._take_running(message)

    def _take_handshake(self, message: Message, frame: Frame) -> list[Event]:
        if isinstance(message, Challenge) and self._transcript is None:
            self._take_challenge(message, frame)
            return []
        if isinstance(message, Welcome) and self._transcript is not None:
            if not is_proof(message.mac, self._secret, GATEWAY, self._transcript):
                raise WireError(f"welcome.mac: the {self.roles[1]} does not know the secret", "secret")
            if self.is_busy and not message.resumed:
                raise WireError(
                    "the host is busy with another gateway, expected one that comes when it is free", "busy"
                )
            self._begin(message)
            self._decoder.max_frame = self.limits.max_frame
            self.phase = Phase.RUNNING
            return [message]
        expected = "challenge" if self._transcript is None else "welcome"
        raise WireError(f"{message.kind} in the handshake, expected {expected}", "order")

    def _take_challenge(self, challenge: Challenge, frame: Frame) -> None:
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
        self._peer_max_frame = challenge.max_frame
        self._heartbeat_s = challenge.heartbeat_s
        self._transcript = transcript_of(self._hello_frame, bytes(frame))
        self._send(Proof(prove(self._secret, HOST, self._transcript)))
