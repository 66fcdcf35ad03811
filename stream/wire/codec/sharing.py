"""Message of weights that take less room."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from numpy.typing import NDArray

from rollflow.stream.wire.codec import field
from rollflow.stream.wire.codec.handshake import MOST_NUMBER

ModuleName = Annotated[str | None, field.nullable(field.text(256))]
PolicyVersion = Annotated[int, field.whole(0, MOST_NUMBER)]


@dataclass(frozen=True, slots=True, eq=False)
class WeightsPacked:
    """Gateway to rollout host, trainer to source: a Weights that takes less room, for an end whose Hello `unpacks`.

    version, module    as in Weights
    base      version of the last WeightsPacked of the module through this connection: the frame is encoded as its
              difference from that one's; None: as it is
    size      bytes of the frame of the Weights, with its length field: a multiple of 4
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

    @property
    def nbytes(self) -> int:
        """Bytes of the frame of the Weights, as `max_frame` counts them."""
        return self.size - 4
