"""A valve on an edge: items wait there until whoever holds the gate lets them through."""

from collections.abc import Callable
from typing import Any, Protocol


class Gate(Protocol):
    """Decides, item by item, whether an edge lets it pass now.

    An item that may not pass is parked; when the gate calls what it was given in `watch`, all parked items are asked
    about again, oldest first. Both happen in the thread that the graph runs in.

    It may have a `holder`: the name of whoever it waits for, who is a stage in the report of a run on an event loop;
    None: nobody, as for a gate without it. It is asked for when items are parked and nothing else is to be done, and
    again once `changed` has been called.
    """

    def admits(self, item: Any) -> bool:
        """Whether the item may pass. Called again for a parked item; True is followed by its passing."""
        ...

    def watch(self, changed: Callable[[], None]) -> None:
        """Take the function to be called whenever an item that was refused might now be admitted."""
        ...
