"""Ways of reading a rollout, by a plain loop, in an event loop, and as a node of a graph; and of ending that."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import anyio
from feeding_rollouts import learner_of

from rollflow import Graph

Act = Callable[[Any, int, Callable[[], object]], bool]
"""Called with what a loop gives, its number from 1 on, and what drains the run; returns whether the loop is left."""


def _loop(rollout: Any, of: str, act: Act, **options: Any) -> None:
    with rollout:
        for number, item in enumerate(getattr(rollout, of)(**options), start=1):
            if act(item, number, rollout.drain):
                break


async def _loop_async(rollout: Any, of: str, act: Act, **options: Any) -> None:
    async with rollout:
        number = 0
        async for item in getattr(rollout, of)(**options):
            number += 1
            if act(item, number, rollout.drain):
                break


async def _loop_in_graph(graph: Graph, of: str, act: Act, begun: Callable[[Any], object] = repr) -> None:
    async with graph.run() as run:
        begun(run)
        number = 0
        async for item in run[of]:
            number += 1
            if act(item, number, run.stop):
                break
        else:
            await run.wait()


async def _loop_in_own_graph(rollout: Any, of: str, act: Act) -> None:
    graph = Graph("ways")
    graph.add(rollout=rollout)
    graph.output("fragments", "rollout.fragments", capacity=1)
    await _loop_in_graph(graph, of, act)


def _read(
    loop: Callable[..., Any], rollout: Any, count: int | None, each: Callable[[int], Any], **options: Any
) -> list[Any]:
    fragments = []

    def take(fragment: Any, number: int, drain: Callable[[], object]) -> bool:
        fragments.append(fragment)
        each(number)
        if number == count:
            drain()
        return False

    loop(rollout, "fragments", take, **options)
    return fragments


def _read_async(loop: Callable[..., Any], backend: str, *given: Any, **options: Any) -> list[Any]:
    return _read(lambda *parts, **more: anyio.run(partial(loop, *parts, **more), backend=backend), *given, **options)


WAYS: dict[str, Callable[..., list[Any]]] = {
    "loop": partial(_read, _loop),
    "asyncio": partial(_read_async, _loop_async, "asyncio"),
    "trio": partial(_read_async, _loop_async, "trio"),
    "graph": partial(_read_async, _loop_in_own_graph, "asyncio"),
    "graph on trio": partial(_read_async, _loop_in_own_graph, "trio"),
}
"""(rollout, how many fragments to take before it is drained; None: all, what to do after each, given the number of
fragments) -> the fragments.

The loops take the keywords of `fragments()`, too.
"""


class LoopError(Exception):
    """Raised in a loop that ends by an error."""


def _ends(ending: str, at: int, scope: anyio.CancelScope | None = None) -> Act:
    """What ends a loop at the item of this number: "left", "raised", "drained" or "cancelled"; any other word: none."""

    def act(item: Any, number: int, drain: Callable[[], object]) -> bool:
        if number != at:
            return False
        if ending == "raised":
            raise LoopError
        if ending == "drained":
            drain()
        if ending == "cancelled":
            assert scope is not None
            scope.cancel()
        return ending == "left"

    return act


def end(rollout: Any, ending: str, at: int = 3, of: str = "batches") -> None:
    """Read a rollout, and end at the batch, or fragment, of this number."""
    _loop(rollout, of, _ends(ending, at))


async def end_async(rollout: Any, ending: str, at: int = 3) -> bool:
    """The same with batches in an event loop; return whether it was cancelled."""
    with anyio.CancelScope() as scope:
        await _loop_async(rollout, "batches", _ends(ending, at, scope))
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
        await _loop_in_graph(graph, "batches", _ends(ending, at, scope), begun)
    return scope.cancelled_caught
