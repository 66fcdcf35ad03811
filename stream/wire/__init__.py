"""The protocol between a gateway and the hosts of environments and rollouts, or a trainer and sources: no I/O."""

from rollflow.stream.wire.address import Address, TcpAddress, UnixAddress, check_secret, parse_address
from rollflow.stream.wire.connection import Broken, Connection, Event, Phase
from rollflow.stream.wire.frame import Buffer, FrameDecoder
from rollflow.stream.wire.gateway import GatewayConnection
from rollflow.stream.wire.handshake import (
    NONCE_BYTES,
    SESSION_BYTES,
    VERSION,
    Challenge,
    Hello,
    LaneGrant,
    Proof,
    Welcome,
)
from rollflow.stream.wire.host import HostConnection
from rollflow.stream.wire.limits import Limits
from rollflow.stream.wire.message import Message, decode, encode
from rollflow.stream.wire.rows import RowForm
from rollflow.stream.wire.running import (
    Answer,
    Credit,
    Cut,
    Done,
    Failed,
    Finished,
    Fragment,
    Goodbye,
    Metrics,
    Ping,
    Pong,
    Receipt,
    Refused,
    Request,
    Reset,
    Rows,
    Settings,
    States,
    Step,
    Turn,
    Weights,
)
from rollflow.stream.wire.session import GatewaySession, HostSession
from rollflow.stream.wire.source import SourceConnection, SourceSession
from rollflow.stream.wire.trainer import TrainerConnection, TrainerSession

__all__ = [
    "NONCE_BYTES",
    "SESSION_BYTES",
    "VERSION",
    "Address",
    "Answer",
    "Broken",
    "Buffer",
    "Challenge",
    "Connection",
    "Credit",
    "Cut",
    "Done",
    "Event",
    "Failed",
    "Finished",
    "Fragment",
    "FrameDecoder",
    "GatewayConnection",
    "GatewaySession",
    "Goodbye",
    "Hello",
    "HostConnection",
    "HostSession",
    "LaneGrant",
    "Limits",
    "Message",
    "Metrics",
    "Phase",
    "Ping",
    "Pong",
    "Proof",
    "Receipt",
    "Refused",
    "Request",
    "Reset",
    "RowForm",
    "Rows",
    "Settings",
    "SourceConnection",
    "SourceSession",
    "States",
    "Step",
    "TcpAddress",
    "TrainerConnection",
    "TrainerSession",
    "Turn",
    "UnixAddress",
    "Weights",
    "Welcome",
    "check_secret",
    "decode",
    "encode",
    "parse_address",
]
