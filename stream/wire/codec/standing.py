"""Messages about what the other end is at: the stall doctor of a gateway asks a host, that of a source its trainer.

A looker asks either of them for snapshots of its runs.
"""

import json
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from rollflow.stream.data.errors import WireError
from rollflow.stream.wire.codec import field
from rollflow.stream.wire.codec.handshake import MOST_NUMBER, LaneId

MOST_CALLS = 64  # of a stack
MOST_PATH, MOST_NAME = 1024, 256  # characters
MOST_JSON = 1 << 21  # characters


@dataclass(frozen=True, slots=True, eq=False)
class StackCall:
    """One call on a stack.

    file      that its code is in
    line      number of the line that it is at, from 1 on; 0: not known
    name      of the function
    source    the line's text; empty: not known
    is_own    whether the code is the user's own: neither the host's software, nor a library
    """

    file: Annotated[str, field.text(MOST_PATH)]
    line: Annotated[int, field.whole(0, MOST_NUMBER)]
    name: Annotated[str, field.text(MOST_NAME)]
    source: Annotated[str, field.text(MOST_NAME)]
    is_own: Annotated[bool, field.flag]


@dataclass(frozen=True, slots=True, eq=False)
class Inspect:
    """Gateway to host: what is this lane at? Source to trainer: what is the code at that takes batches?

    Looker to gateway or trainer: what are your runs at?

    lane    the lane; 0 for a trainer, and from a looker
    """

    kind: ClassVar[str] = "inspect"
    lane: LaneId


@dataclass(frozen=True, slots=True, eq=False)
class Standing:
    """Host to gateway, trainer to source: the answer to an Inspect.

    lane        that of the Inspect
    doing       what it is at, in words: "is in step()"
    elapsed     seconds since that has begun
    calls       stack of its thread, innermost call first; empty: it has none
    """

    kind: ClassVar[str] = "standing"
    lane: LaneId
    doing: Annotated[str, field.text(MOST_NAME)]
    elapsed: Annotated[float, field.elapsed]
    calls: Annotated[tuple[StackCall, ...], field.list_of(field.record(StackCall), MOST_CALLS)]


@dataclass(frozen=True, slots=True, eq=False)
class Snapshots:
    """Gateway or trainer to looker: the answer to an Inspect.

    json    list of the snapshots of all runs of the process, as JSON
    """

    kind: ClassVar[str] = "snapshots"
    json: Annotated[str, field.text(MOST_JSON)]

    def runs(self) -> list[dict[str, Any]]:
        """The snapshots. Raises WireError for what is none."""
        try:
            found = json.loads(self.json)
        except (ValueError, RecursionError) as error:
            raise WireError(f"snapshots.json is no JSON: {error}") from None
        if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
            raise WireError(f"snapshots.json is {self.json[:100]!r}, expected a list of maps")
        return found
