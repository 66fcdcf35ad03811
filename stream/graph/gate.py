"""Gate: a valve on an edge, at which items wait until they are admitted."""

from collections.abc import Callable
from typing import Any, Protocol


class Gate(Protocol):
    """Decides item by item whether an edge lets it pass now.

    A refused item is parked. When the gate calls the function passed to `watch`, all parked items are tried again,
    oldest first. Both happen in the thread that the graph runs in.

    A gate may have an attribute `holder`: the name of the party that it waits for, or None. In a run on an event loop
    the holder is a stage of the report. It is read when items are parked and nothing else can be done.

    A gate may have a method `waits_for() -> Wait | None`: what refused items wait for, for the stall doctor. It is
    called from another thread.
    """

    def admits(self, item: Any) -> bool:
        """True if the item may pass; it then passes. Called again for a parked item."""
        ...

    def watch(self, changed: Callable[[], None]) -> None:
        """Keep `changed`, and call it whenever a refused item might now be admitted."""
        ...
