"""Nodes and gates of a graph: what they may have, the note on their errors, and how they are closed."""

import math
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol

import anyio

if TYPE_CHECKING:
    from rollflow.stream.graph.graph import Graph


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


def note_node(error: BaseException, name: str) -> None:
    """Add the note "in node ..." to an error that has none yet.

    Raises RuntimeError in place of a StopIteration, which would silently end the iterators that it passes through.
    """
    if isinstance(error, StopIteration):
        replacement = RuntimeError("a node raised StopIteration")
        replacement.add_note(f"in node '{name}'")
        raise replacement from error
    if not any(note.startswith("in node ") for note in getattr(error, "__notes__", ())):
        error.add_note(f"in node '{name}'")


def close_nodes(graph: "Graph") -> None:
    """Call `close()` of every node that has it, even if one raises; then raise the error, or a group of several."""
    errors: list[Exception] = []
    for name, spec in graph.nodes.items():
        close = getattr(spec.node, "close", None)
        if close is None:
            continue
        try:
            close()
        except Exception as error:
            note_node(error, name)
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ExceptionGroup(f"closing graph '{graph.name}'", errors)


async def ending_quietly(task: Callable[[], Awaitable[None]]) -> None:
    """Run a task of a group: where it is cancelled with the group, or with what is around it, it ends without an error.

    An event loop would keep the cancellation in a cycle, with a frame that refers to all callers of the loop.
    """
    try:
        await task()
    except anyio.get_cancelled_exc_class():
        if anyio.current_effective_deadline() != -math.inf:
            raise
