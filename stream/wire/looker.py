"""Looker's end of a connection: it looks at the runs of the process that listens, and does nothing else."""

from collections.abc import Callable

from rollflow.stream.data.errors import WireError
from rollflow.stream.wire.codec.handshake import LOOKER, NONCE_BYTES, SESSION_BYTES, VERSION, Hello, Welcome
from rollflow.stream.wire.codec.limits import Limits
from rollflow.stream.wire.codec.message import Message
from rollflow.stream.wire.codec.standing import Snapshots
from rollflow.stream.wire.connection import Event
from rollflow.stream.wire.ends import Initiator


class LookerConnection(Initiator):
    """A looker's end. Its Hello has one lane, which nobody uses.

    software    name of the software at this end, for people
    token       gives so many random bytes

    Events:

        Welcome                     the other end has accepted this one: ask by `tell` with an Inspect of lane 0
        Snapshots                   the answer to each
        Goodbye, ConnectionBroken   the end
    """

    roles = LOOKER, "run"

    def __init__(
        self, software: str, token: Callable[[int], bytes], *, secret: bytes | None, limits: Limits, now: float
    ) -> None:
        hello = Hello(
            versions=(VERSION, VERSION),
            role=LOOKER,
            software=software,
            name=software,
            nonce=token(NONCE_BYTES),
            session=token(SESSION_BYTES),
            max_frame=limits.max_frame,
            slots=(1,),
            observation_space={},
            action_space={},
            autoreset="DISABLED",
            metadata={},
        )
        super().__init__(hello, secret=secret, limits=limits, now=now)

    def _begin(self, welcome: Welcome) -> None:
        """Nothing: a looker has no memory."""

    def _take_running(self, message: Message) -> list[Event]:
        if isinstance(message, Snapshots):
            return [message]
        raise WireError(f"{message.kind} to a looker, expected snapshots", "order")
