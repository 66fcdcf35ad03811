"""How much one end of a wire takes from the other."""

from dataclasses import dataclass, fields

MAX_HEADER = 4 << 20  # bytes of a frame's header
MAX_VALUES = 1 << 18  # values in a header: entries of lists, keys and values of maps
MAX_DEPTH = 32  # lists, maps and ext values inside each other in a header
MAX_EXT_DEPTH = 8  # ext values inside each other: each costs the unpacker 40 KiB of stack
MAX_OTHER_KEYS = 1024  # keys of maps in a header that are no strings: their hashes can be made to collide
MAX_HANDSHAKE_FRAME = 1 << 20  # bytes of a frame from a host that has not proved itself yet


@dataclass(frozen=True, slots=True)
class Limits:
    """What one end asks of the other.

    max_frame      bytes of a frame that it takes, behind the length itself
    undelivered    bytes that may wait for a peer that does not read, beside requests and answers, one of each lane;
                   more than `max_frame` of either end
    handshake_s    seconds until the handshake must be over
    heartbeat_s    seconds of silence after which a peer is asked whether it is there; the gateway's holds for both
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
