"""Nodes that gather ready lanes into one forward pass."""

from collections.abc import Iterator, Sequence
from functools import partial
from threading import get_ident
from typing import Generic, Protocol, TypeVar

import anyio
import anyio.to_thread

from rollflow.stream.graph.channel import Inlet, Outlet
from rollflow.stream.graph.meter import clock
from rollflow.stream.observe.stacks import stack_of_thread
from rollflow.stream.observe.waits import Wait

L = TypeVar("L")
L_contra = TypeVar("L_contra", contravariant=True)


class LanesForward(Protocol[L_contra]):
    """Forward passes over several lanes together, with one agent in each environment or several."""

    def rows(self, lane: L_contra) -> int:
        """Rows of a lane in a pass."""
        ...

    def forward_lanes(self, lanes: Sequence[L_contra]) -> None:
        """Do the pass; each lane gets its rows of the output."""
        ...


class ReadyForward(Generic[L]):
    """A node that runs the module over all lanes that are ready at a time, in one pass; it waits for none.

    forward      the pass
    max_batch    slots in one pass, at most
    """

    patience = None

    def __init__(self, forward: LanesForward[L], *, max_batch: int) -> None:
        self._forward = forward
        self._max_batch = max_batch
        self._ready: list[L] = []

    def __call__(self, batches: L) -> L | None:
        """Take a lane for the next pass."""
        self._ready.append(batches)
        return None

    @property
    def in_flight(self) -> int:
        """Lanes that the next pass will be over."""
        return len(self._ready)

    def fileno(self) -> int:
        """There is nothing to wait for."""
        return -1

    def completed(self) -> Iterator[L]:
        """The lanes after a pass over them."""
        ready = self._ready
        while ready:
            slots, count = self._forward.rows(ready[0]), 1
            # A lane's slots go together, also where one came later that has more.
            while count < len(ready) and (slots := slots + self._forward.rows(ready[count])) <= self._max_batch:
                count += 1
            lanes = ready[:count]
            self._forward.forward_lanes(lanes)
            del ready[:count]
            yield from lanes

    def describe(self) -> str:
        """The bound of a pass, for `explain()`."""
        return f"up to {self._max_batch} slots a pass"


class GatheringForward(Generic[L]):
    """A node that waits for what lanes are ready and runs the module over all of them in one pass.

    forward      the pass
    max_batch    slots in one pass, at most
    max_wait     seconds to wait for further lanes once one is there
    in_thread    run the pass in a worker thread, so that other lanes' environments step meanwhile
    """

    def __init__(
        self, forward: LanesForward[L], *, max_batch: int, max_wait: float = 0.0, in_thread: bool = False
    ) -> None:
        self._forward = forward
        self._max_batch = max_batch
        self._max_wait = max_wait
        self._in_thread = in_thread
        self._passes = 0
        self._begun: tuple[int, int] | None = None  # when the pass under way began, in ns, and its thread

    async def run(self, batches: Inlet[L], outputs: Outlet[L]) -> None:
        """Gather, pass, split, until no more lanes come."""
        waiting: L | None = None  # came last, but did not fit into the pass before
        async for first in batches:
            waiting = first
            while waiting is not None:
                lanes, waiting = await self._gather(waiting, batches)
                if self._in_thread:
                    await anyio.to_thread.run_sync(self._pass, lanes)
                else:
                    self._pass(lanes)
                for lane in lanes:
                    await outputs.send(lane)

    def at_work(self, name: str) -> Iterator[Wait]:
        """The pass under way."""
        begun = self._begun
        if begun is not None:
            age_s, stack = (clock() - begun[0]) / 1e9, partial(stack_of_thread, begun[1])
            calls = self._passes
            yield Wait(name, "call", "is in a forward pass", (), begun, age_s, calls, stack=stack)

    def _pass(self, lanes: Sequence[L]) -> None:
        self._begun = clock(), get_ident()
        try:
            self._forward.forward_lanes(lanes)
        finally:
            self._begun = None
        self._passes += 1

    def describe(self) -> str:
        """The bounds of a pass, for `explain()`."""
        return f"up to {self._max_batch} slots a pass, waits {self._max_wait * 1e3:g} ms"

    async def _gather(self, first: L, batches: Inlet[L]) -> tuple[list[L], L | None]:
        lanes, slots = [first], self._forward.rows(first)
        with anyio.move_on_after(self._max_wait):
            while slots < self._max_batch:
                try:
                    lane = batches.receive_nowait()
                except anyio.WouldBlock:
                    if self._max_wait == 0.0:
                        break
                    try:
                        lane = await batches.receive()
                    except anyio.EndOfStream:
                        break
                except anyio.EndOfStream:
                    break
                slots += self._forward.rows(lane)
                if slots > self._max_batch:
                    return lanes, lane
                lanes.append(lane)
        return lanes, None


def joint_forward(
    forward: LanesForward[L], largest: int, max_batch: int | None, max_wait: float, *, in_thread: bool
) -> ReadyForward[L] | GatheringForward[L] | None:
    """The node that does passes over several lanes; None: every lane has passes of its own.

        largest    slots of the largest lane

    Raises ValueError where a lane does not fit into a pass.
    """
    if max_batch is None and not in_thread:
        return None
    if max_batch is not None and max_batch < largest:
        raise ValueError(f"max_batch is {max_batch}, expected at least {largest}: a lane's slots go together")
    if not max_wait and not in_thread and max_batch is not None:
        return ReadyForward(forward, max_batch=max_batch)
    return GatheringForward(forward, max_batch=max_batch or largest, max_wait=max_wait, in_thread=in_thread)
