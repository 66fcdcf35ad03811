"""Messages of traces: a gateway asks a host what its lanes were at, a source asks its trainer for its updates."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray

from rollflow.stream.data.errors import WireError
from rollflow.stream.wire.codec import field
from rollflow.stream.wire.codec.handshake import MOST_NUMBER, Number

MOST_SPANS = 1024  # in one message: with its items it fits the smallest frame that an end may take
MOST_ITEMS = 1024
MOST_NAMES = 64
MOST_NAME = 64  # characters
LATEST_NS = 1 << 62  # of a time: 146 years

Times = Annotated[NDArray[np.int64], field.numbers("<i8")]


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """Gateway to host, source to trainer: what were you at since the last of these?

    number     of the request: 1, 2, … for each connection
    goes_on    whether spans are to be kept for another request; False: no more are wanted
    """

    kind: ClassVar[str] = "trace"
    number: Number
    goes_on: Annotated[bool, field.flag]


@dataclass(frozen=True, slots=True, eq=False)
class TraceSpans:
    """Host to gateway, trainer to source: the answer to a TraceRequest. Times are in ns, on the sender's own clock.

    number        of the request; 0: there was none, and this is what is left before a goodbye
    clock         i64[2]  when the request came, and when this was sent
    names         of what spans are of: "step", "module", "update"
    lanes         i64[n]  lane of each span; 0 for a trainer
    kinds         i64[n]  place of its name in `names`
    begins,       i64[n]  when it began and ended
    ends
    items         i64[m]  numbers of the items, in the stream to the trainer, that an update used
    item_spans    i64[m]  place of the span that used each
    dropped       spans since the last answer that were too many to be kept
    has_more      whether there are others to be had at once
    """

    kind: ClassVar[str] = "spans"
    number: Annotated[int, field.whole(0, MOST_NUMBER)]
    clock: Times
    names: Annotated[tuple[str, ...], field.list_of(field.text(MOST_NAME), MOST_NAMES)]
    lanes: Times
    kinds: Times
    begins: Times
    ends: Times
    items: Times
    item_spans: Times
    dropped: Annotated[int, field.whole(0, MOST_NUMBER)]
    has_more: Annotated[bool, field.flag]

    def check(self) -> None:
        """Raise WireError where the columns make no sense together."""
        count, of_items = len(self.lanes), len(self.items)
        if len(self.clock) != 2 or self.clock[0] > self.clock[1]:
            raise WireError(f"spans.clock is {self.clock.tolist()[:4]}, expected [came, sent], in this order")
        for name in ("clock", "begins", "ends"):  # so that the sum of a time and an offset is an i64 as well
            times = getattr(self, name)
            if len(times) and not (0 <= times.min() and times.max() <= LATEST_NS):
                raise WireError(
                    f"spans.{name} goes from {times.min()} to {times.max()}, expected times from 0 to {LATEST_NS} ns"
                )
        if not len(self.kinds) == len(self.begins) == len(self.ends) == count <= MOST_SPANS:
            raise WireError(f"spans: columns of {count} spans are of other lengths, or of more than {MOST_SPANS}")
        if not len(self.item_spans) == of_items <= MOST_ITEMS:
            raise WireError(f"spans: columns of {of_items} items are of other lengths, or of more than {MOST_ITEMS}")
        if count and not (0 <= self.kinds.min() and self.kinds.max() < len(self.names)):
            raise WireError(f"spans.kinds goes to {self.kinds.max()}, expected places of {len(self.names)} names")
        if of_items and not (0 <= self.item_spans.min() and self.item_spans.max() < count):
            raise WireError(f"spans.item_spans goes to {self.item_spans.max()}, expected places of {count} spans")
        if not (self.begins <= self.ends).all():
            raise WireError("spans: one ends before it begins, expected it to begin first")

    def of_lanes(self, lanes: Collection[int]) -> "TraceSpans":
        """The spans of these lanes; the others count as dropped."""
        is_kept = np.isin(self.lanes, list(lanes))
        if is_kept.all():
            return self
        has_item = is_kept[self.item_spans]
        columns = {name: getattr(self, name)[is_kept] for name in ("lanes", "kinds", "begins", "ends")}
        return replace(
            self,
            **columns,
            items=self.items[has_item],
            item_spans=(np.cumsum(is_kept) - 1)[self.item_spans[has_item]],
            dropped=self.dropped + int(np.count_nonzero(~is_kept)),
        )
