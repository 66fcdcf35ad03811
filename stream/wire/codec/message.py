"""Encoding of messages as frames. A header is a map of `kind` and the message's fields by their names.

A field with its default value is left out.
"""

import dataclasses
from typing import Any, get_args

from rollflow.stream.data.errors import WireError
from rollflow.stream.wire.codec.field import checked_fields, checks_of, defaults_of, shown
from rollflow.stream.wire.codec.frame import Buffer, Frame, frame_of, taken_apart
from rollflow.stream.wire.codec.handshake import Challenge, Hello, LaneGrant, Proof, Welcome
from rollflow.stream.wire.codec.messages import Running
from rollflow.stream.wire.codec.value import decode_value, encode_value

Message = Hello | Challenge | Proof | Welcome | Running

KINDS: dict[str, type[Message]] = {kind.kind: kind for kind in get_args(Message)}


def encode(message: Message) -> list[Buffer]:
    """The frame of a message, as a list of buffers.

    Large arrays are not copied: they must not change until sent. Raises WireError for a field that `decode` would
    refuse, and ColumnError for a value that can't be sent.
    """
    kind: Any = type(message)
    fields = {name: check(getattr(message, name), f"{kind.kind}.{name}") for name, check in checks_of(kind).items()}
    for name, default in defaults_of(kind).items():
        if fields[name] is default:
            del fields[name]
    if kind is Welcome:
        fields["lanes"] = [_as_map(grant) for grant in fields["lanes"]]
    listed = {name: list(value) if type(value) is tuple else value for name, value in fields.items()}
    return frame_of(*encode_value({"kind": kind.kind} | listed, kind.kind))


def decode(frame: Frame | bytes) -> Message:
    """The message in a frame from a `FrameDecoder`. Raises WireError for an invalid frame.

    Arrays are views of `frame`, writable if it is; a decoder's frame has memory of its own.
    """
    header = decode_value(*taken_apart(frame))
    if type(header) is not dict:
        raise WireError(f"header: {shown(header)}, expected a map")
    name = header.get("kind")
    kind = KINDS.get(name) if type(name) is str else None
    if kind is None:
        raise WireError(f"header: kind {shown(name)}, expected one of {', '.join(KINDS)}")
    return kind(**checked_fields(kind, header, kind.kind))


def _as_map(grant: LaneGrant) -> dict[str, Any]:
    return {
        field.name: check(getattr(grant, field.name), f"welcome.lanes.{field.name}")
        for field, check in zip(dataclasses.fields(grant), checks_of(LaneGrant).values(), strict=True)
    }
