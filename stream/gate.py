"""A valve on an edge: items wait there until whoever holds the gate lets them through."""

from collections.abc import Callable
from typing import Any, Protocol


class Gate(Protocol):
    """Decides, item by item, whether an edge lets it pass now.

    An item that may not pass is parked; when the gate calls what it was given in `watch`, all parked items are asked
    about again, oldest first. Both happen in the thread that the graph runs in.
    """

    def admits(self, item: Any) -> bool:
        """Whether the item may pass. Called again for a parked item; True is followed by its passing."""
        ...

    def watch(self, changed: Callable[[], None]) -> None:
        """Take the function to be called whenever an item that was refused might now be admitted."""
        ...
