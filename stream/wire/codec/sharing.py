"""Messages about weights that hosts of one machine share: one gets them whole, and the others read them in its memory.

The host that has them whole puts them, as the frame of a `Weights`, into a file that lies in memory and has no name in
any folder. Other processes of its user open it as `/proc/PROCESS/fd/DESCRIPTOR`.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

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
