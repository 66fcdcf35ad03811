"""Limits on the bytes, values and times of a connection."""

from dataclasses import dataclass, fields

MAX_HEADER = 4 << 20  # bytes of a frame's header
MAX_VALUES = 1 << 18  # values in a header: entries of lists, keys and values of maps
MAX_DEPTH = 32  # nested lists, maps and ext values in a header
MAX_EXT_DEPTH = 8  # nested ext values: each costs the unpacker 40 KiB of stack
MAX_OTHER_KEYS = 1024  # map keys in a header that are no strings: their hashes can be made to collide
MAX_HANDSHAKE_FRAME = 1 << 20  # bytes of a frame during the handshake


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that one end of a connection sets.

    max_frame      largest frame that it takes, in bytes, without the length field
    undelivered    bytes that may wait for a peer that does not read, besides one request or answer of each lane;
                   more than `max_frame` of either end
    handshake_s    seconds until the handshake must be over
    heartbeat_s    seconds of silence after which the peer gets a ping; the gateway's value holds for both ends
    grace_s        seconds that a gateway waits for a lost host to come back
    """

    max_frame: int = 1 << 30
    undelivered: int = 2 << 30
    handshake_s: float = 10.0
    heartbeat_s: float = 10.0
    grace_s: float = 60.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(f"{field.name} is {getattr(self, field.name)}, expected more than 0")
