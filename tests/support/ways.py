"""Ways of reading a rollout: by a plain loop, in an event loop, and as a node of a graph."""

from collections.abc import Callable
from functools import partial
from typing import Any

import anyio

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
