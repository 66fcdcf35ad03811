"""Ways of reading a rollout, by a plain loop, in an event loop, and as a node of a graph; and of ending that."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import anyio
from feeding_rollouts import learner_of

from rollflow import Graph

Each = Callable[[int], Any]
"""Called with the number of fragments after each of them."""


def _read(rollout: Any, count: int | None, each: Each, **loop: Any) -> list[Any]:
    fragments = []
    with rollout:
        for fragment in rollout.fragments(**loop):
            fragments.append(fragment)
            each(len(fragments))
            if len(fragments) == count:
                rollout.drain()
    return fragments


def _read_async(backend: str, rollout: Any, count: int | None, each: Each, **loop: Any) -> list[Any]:
    async def read() -> list[Any]:
        fragments = []
        async with rollout:
            async for fragment in rollout.fragments(**loop):
                fragments.append(fragment)
                each(len(fragments))
                if len(fragments) == count:
                    rollout.drain()
        return fragments

    return anyio.run(read, backend=backend)


def _read_in_graph(backend: str, rollout: Any, count: int | None, each: Each) -> list[Any]:
    async def read() -> list[Any]:
        graph, fragments = Graph("ways"), []
        graph.add(rollout=rollout)
        graph.output("fragments", "rollout.fragments", capacity=1)
        async with graph.run() as running:
            async for fragment in running["fragments"]:
                fragments.append(fragment)
                each(len(fragments))
                if len(fragments) == count:
                    running.stop()
        return fragments

    return anyio.run(read, backend=backend)


WAYS: dict[str, Callable[..., list[Any]]] = {
    "loop": _read,
    "asyncio": partial(_read_async, "asyncio"),
    "trio": partial(_read_async, "trio"),
    "graph": partial(_read_in_graph, "asyncio"),
    "graph on trio": partial(_read_in_graph, "trio"),
}
"""(rollout, how many fragments to take before it is drained; None: all, what to do after each) -> the fragments.

The loops take the keywords of `fragments()`, too.
"""


class LoopError(Exception):
    """Raised in a loop that ends by an error."""


def _is_left(ending: str, drain: Callable[[], None], scope: anyio.CancelScope | None = None) -> bool:
    """Do in a loop what ends it; return whether the loop is to be left."""
    if ending == "raised":
        raise LoopError
    if ending == "drained":
        drain()
    if ending == "cancelled":
        assert scope is not None
        scope.cancel()
    return ending == "left"


def end(rollout: Any, ending: str, at: int = 3, of: str = "batches") -> None:
    """Read a rollout until the batch, or fragment, of this number, and end: "left", "raised", "drained".

    With any other word the rollout is read to its end.
    """
    with rollout:
        for number, _ in enumerate(getattr(rollout, of)(), start=1):
            if number == at and _is_left(ending, rollout.drain):
                break


async def end_async(rollout: Any, ending: str, at: int = 3) -> bool:
    """The same with batches in an event loop, where it may be "cancelled" as well; return whether it was.

    at    0: it is left before the first batch
    """
    with anyio.CancelScope() as scope:
        async with rollout:
            number = 0
            if at == 0:
                return False
            async for _ in rollout.batches():
                number += 1
                if number == at and _is_left(ending, rollout.drain, scope):
                    break
    return scope.cancelled_caught


def graph_with(rollout: Any, sinks: Mapping[str, Any] = {}, capacity: int = 2, **learner: Any) -> Graph:
    """A graph of a rollout, its learner pipeline with an output for "batches", and sinks of fragments by name."""
    graph = Graph("ways")
    graph.add(rollout=rollout, learner=learner_of(rollout, **learner), **sinks)
    for name in ("learner", *sinks):
        graph.connect("rollout.fragments", name, capacity=capacity)
    graph.output("batches", "learner", capacity=capacity)
    return graph


async def end_in_graph(graph: Graph, ending: str, at: int = 3, begun: Callable[[Any], object] = repr) -> bool:
    """The same with the batches of a graph, whose run `begun` is called with."""
    with anyio.CancelScope() as scope:
        async with graph.run() as run:
            begun(run)
            number = 0
            async for _ in run["batches"]:
                number += 1
                if number == at and _is_left(ending, run.stop, scope):
                    break
            else:
                await run.wait()
    return scope.cancelled_caught
