"""Messages as frames. A header is a map: `kind`, and the message's fields by their names.

All of them are there, but for one that has a default: it is left out where it has that.
"""

import dataclasses
from typing import Any

from rollflow.stream.errors import WireError
from rollflow.stream.wire.agent_rows import AgentRows
from rollflow.stream.wire.field import checked_fields, checks_of, defaults_of, shown
from rollflow.stream.wire.frame import Buffer, Frame, frame_of, taken_apart
from rollflow.stream.wire.handshake import Challenge, Hello, LaneGrant, Proof, Welcome
from rollflow.stream.wire.running import (
    Aside,
    Block,
    Come,
    Credit,
    Cut,
    Done,
    Failed,
    Finished,
    Forget,
    Fragment,
    Free,
    Goodbye,
    Lent,
    Metrics,
    Ping,
    Pong,
    Receipt,
    Refused,
    Reset,
    Rows,
    Series,
    Settings,
    States,
    Step,
    Turn,
    Weights,
)
from rollflow.stream.wire.value import decode_value, encode_value

Handshake = Hello | Challenge | Proof | Welcome
Running = (
    Reset
    | Step
    | Rows
    | AgentRows
    | Failed
    | Turn
    | Cut
    | Fragment
    | Block
    | Lent
    | Series
    | Forget
    | Free
    | Settings
    | Weights
    | States
    | Done
    | Finished
    | Come
    | Aside
    | Receipt
    | Metrics
    | Credit
    | Ping
    | Pong
    | Goodbye
    | Refused
)
Message = Handshake | Running

KINDS: dict[str, type[Message]] = {
    kind.kind: kind
    for kind in (
        *(Hello, Challenge, Proof, Welcome),
        *(Reset, Step, Rows, AgentRows, Failed),
        *(Turn, Cut, Fragment, Settings, Weights, States, Done, Finished, Come, Aside, Receipt, Metrics),
        *(Block, Lent, Series, Forget, Free),
        *(Credit, Ping, Pong, Goodbye, Refused),
    )
}


def encode(message: Message) -> list[Buffer]:
    """The frame of a message, in buffers one after the other.

    Large arrays are referred to, not copied: they must stay as they are until sent. Raises WireError for a field that
    `decode` would refuse, and ColumnError for a value in it that can't be sent.
    """
    kind = type(message)
    fields = {name: check(getattr(message, name), f"{kind.kind}.{name}") for name, check in checks_of(kind).items()}
    for name, default in defaults_of(kind).items():
        if fields[name] is default:
            del fields[name]
    if kind is Welcome:
        fields["lanes"] = [_as_map(grant) for grant in fields["lanes"]]
    listed = {name: list(value) if type(value) is tuple else value for name, value in fields.items()}
    return frame_of(*encode_value({"kind": kind.kind} | listed, kind.kind))


def decode(frame: Frame | bytes) -> Message:
    """The message in a frame that a `FrameDecoder` gave. Raises WireError where it is none.

    Arrays are views of `frame`: writable where that is, and of nobody else's memory where it came from a decoder.
    """
    told = decode_value(*taken_apart(frame))
    if type(told) is not dict:
        raise WireError(f"header: {shown(told)}, expected a map")
    name = told.get("kind")
    kind = KINDS.get(name) if type(name) is str else None
    if kind is None:
        raise WireError(f"header: kind {shown(name)}, expected one of {', '.join(KINDS)}")
    return kind(**checked_fields(kind, told, kind.kind))


def _as_map(grant: LaneGrant) -> dict[str, Any]:
    return {
        field.name: check(getattr(grant, field.name), f"welcome.lanes.{field.name}")
        for field, check in zip(dataclasses.fields(grant), checks_of(LaneGrant).values(), strict=True)
    }
