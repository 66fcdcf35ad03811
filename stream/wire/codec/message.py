"""Encoding of messages as frames. A header is a map of `kind` and the message's fields by their names.

A field with its default value is left out.
"""

import logging
from functools import partial
from typing import Any, get_args

from rollflow.stream.data.errors import ColumnError, WireError
from rollflow.stream.data.packing import can_pack, sendable
from rollflow.stream.wire.codec.field import checked_fields, checks_of, defaults_of, shown
from rollflow.stream.wire.codec.frame import Buffer, Frame, frame_of, taken_apart
from rollflow.stream.wire.codec.handshake import Challenge, Hello, Proof, Welcome
from rollflow.stream.wire.codec.messages import Running
from rollflow.stream.wire.codec.value import decode_value, encode_value

logger = logging.getLogger(__name__)

Message = Hello | Challenge | Proof | Welcome | Running

KINDS: dict[str, type[Message]] = {kind.kind: kind for kind in get_args(Message)}
_left_out: set[str] = set()  # entries of infos that this process has logged
_MOST_LEFT_OUT = 1000
_can_send = partial(can_pack, packed=partial(encode_value, name=""))


def encode(message: Message) -> list[Buffer]:
    """The frame of a message, as a list of buffers.

    Large arrays are not copied: they must not change until sent. Entries of infos that can't be sent are left out, and
    logged once. Raises WireError for a field that `decode` would refuse, and ColumnError for another value that can't
    be sent.
    """
    kind: Any = type(message)
    fields, defaults = _as_map(message, kind.kind), defaults_of(kind)
    fields = {name: value for name, value in fields.items() if name not in defaults or value is not defaults[name]}
    if kind is Welcome:
        fields["lanes"] = [_as_map(lane, "welcome.lanes") for lane in fields["lanes"]]
    listed = {name: list(value) if type(value) is tuple else value for name, value in fields.items()}
    value = {"kind": kind.kind} | listed
    try:
        return frame_of(*encode_value(value, kind.kind))
    except (ColumnError, WireError):
        return frame_of(*encode_value(sendable(value, _log_left_out, _can_send), kind.kind))


def _log_left_out(text: str) -> None:
    """Log what is left out of infos, once for each entry and type of value."""
    entry = text.partition(" is ")[0] + text.rpartition(", of type ")[2]
    if entry not in _left_out and len(_left_out) < _MOST_LEFT_OUT:
        _left_out.add(entry)
        logger.warning("%s, can't be sent to another process: it is left out (said once)", text)


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


def _as_map(record: Any, where: str) -> dict[str, Any]:
    kind: Any = type(record)
    return {name: check(getattr(record, name), f"{where}.{name}") for name, check in checks_of(kind).items()}
