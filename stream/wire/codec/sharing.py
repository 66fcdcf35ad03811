"""Messages that spare the network weights: those of hosts that share them, and weights that are packed.

Of the hosts of one machine one gets weights whole, and the others read them in its memory. That one puts them, as the
frame of a `Weights`, into a file that lies in memory and has no name in any folder. Other processes of its user open it
as `/proc/PROCESS/fd/DESCRIPTOR`.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from numpy.typing import NDArray

from rollflow.stream.wire.codec import field
from rollflow.stream.wire.codec.handshake import MOST_NUMBER

MARK_BYTES = 16

ModuleName = Annotated[str | None, field.nullable(field.text(256))]
PolicyVersion = Annotated[int, field.whole(0, MOST_NUMBER)]


@dataclass(frozen=True, slots=True, eq=False)
class WeightsComing:
    """Gateway to rollout host: weights of this version or a newer one will come. Its next Turn waits for them.

    version, module    as in Weights
    """

    kind: ClassVar[str] = "coming"
    version: PolicyVersion
    module: ModuleName = None


@dataclass(frozen=True, slots=True, eq=False)
class WeightsShared:
    """Rollout host to gateway: the weights that it was to share lie here. Gateway to rollout host: read them there.

    version, module    as in Weights
    process            number of the process that has the file open
    descriptor         number of the file in that process
    size               bytes of the file, which is the frame of a Weights
    mark               16 random bytes, which the file's name has in it
    """

    kind: ClassVar[str] = "shared"
    version: PolicyVersion
    process: Annotated[int, field.whole(1, MOST_NUMBER)]
    descriptor: Annotated[int, field.whole(0, MOST_NUMBER)]
    size: Annotated[int, field.whole(16, 1 << 40)]
    mark: Annotated[bytes, field.raw(MARK_BYTES)]
    module: ModuleName = None


@dataclass(frozen=True, slots=True, eq=False)
class WeightsUnread:
    """Rollout host to gateway: it could not read shared weights, or not share those that it has.

    version, module    as in Weights
    mark               of the file that it could not read; None: it could make none
    """

    kind: ClassVar[str] = "unread"
    version: PolicyVersion
    mark: Annotated[bytes | None, field.nullable(field.raw(MARK_BYTES))]
    module: ModuleName = None


@dataclass(frozen=True, slots=True, eq=False)
class WeightsPacked:
    """Gateway to rollout host, trainer to source: a Weights that takes less room, for an end whose Hello `unpacks`.

    version, module, share    as in Weights
    base      version of the last WeightsPacked of the module through this connection: the frame is encoded as its
              difference from that one's; None: as it is
    size      bytes of the frame of the Weights, with `share` left out, and with its length field: a multiple of 4
    checksum  CRC-32 of that frame
    packed    u8[n], a frame of Zstandard: see the protocol's documentation
    """

    kind: ClassVar[str] = "packed"
    version: PolicyVersion
    base: Annotated[int | None, field.nullable(field.whole(0, MOST_NUMBER))]
    size: Annotated[int, field.whole(16, 1 << 32)]
    checksum: Annotated[int, field.whole(0, 0xFFFFFFFF)]
    packed: Annotated[NDArray[Any], field.array]
    module: ModuleName = None
    share: Annotated[bool, field.flag] = False

    @property
    def nbytes(self) -> int:
        """Bytes of the frame of the Weights, as `max_frame` counts them."""
        return self.size - 4


Sharing = WeightsComing | WeightsShared | WeightsUnread | WeightsPacked
