"""The protocol, without I/O: between a gateway and hosts of environments or rollouts, and a trainer and sources."""

from rollflow.stream.wire.address import Address, TcpAddress, UnixAddress, check_secret, parse_address
from rollflow.stream.wire.codec.frame import FrameDecoder
from rollflow.stream.wire.codec.handshake import SESSION_BYTES, Challenge, Hello, LaneGrant, Proof, Welcome
from rollflow.stream.wire.codec.limits import Limits
from rollflow.stream.wire.codec.message import Message, decode, encode
from rollflow.stream.wire.codec.messages import (
    AgentRows,
    Answer,
    Cut,
    Done,
    Failed,
    Fragment,
    Goodbye,
    Metrics,
    Ping,
    Pong,
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
from rollflow.stream.wire.codec.rows import AgentForm
from rollflow.stream.wire.connection import FAILED, Connection, ConnectionPhase, Event
from rollflow.stream.wire.gateway import GatewayConnection, HostConnection
from rollflow.stream.wire.items import ReceiverConnection, ReceiverSession, SenderConnection, SenderSession
from rollflow.stream.wire.session import GatewaySession, HostSession

__all__ = ["Limits"]  # for users; all else is for rollflow itself
