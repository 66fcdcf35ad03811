"""The forward pass: one lane at a time, or several ready lanes in one pass."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from threading import get_ident
from typing import Any, Generic, Protocol, TypeVar

import anyio
import anyio.to_thread
import torch

from rollflow.nodes.modules.flat_forward import FlatForward
from rollflow.nodes.modules.policy_weights import PolicyWeights
from rollflow.nodes.modules.torch_threads import TorchThreads
from rollflow.nodes.stages.joint_output import joint_pass, note_batch
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ModuleError
from rollflow.stream.data.tree import leaves_of
from rollflow.stream.doctor.stacks import stack_of_thread
from rollflow.stream.doctor.waits import Wait
from rollflow.stream.fragments.lane import Lane
from rollflow.stream.graph.channel import Inlet, Outlet
from rollflow.stream.graph.interrupts import interrupts
from rollflow.stream.graph.meter import clock

L = TypeVar("L")
L_contra = TypeVar("L_contra", contravariant=True)

_LOOK_EVERY = 16
# What a rollout records itself, of which an output would be something else.
_KEPT = {
    Columns.OBS,
    Columns.REWARDS,
    Columns.TERMINATEDS,
    Columns.TRUNCATEDS,
    Columns.INFOS,
    Columns.POLICY_VERSION,
}


class ModuleForward:
    """A node that runs a module over a lane's batch.

        module     has `forward_exploration(batch)` and `forward_inference(batch)`, each dict to dict
        weights    where newly published weights come from; loaded between two passes, never during one
        explore    which of the two methods is called
    flat       do a pass as the flat list of operations that it comes down to: see `FlatForward`
    threads    that torch uses for a pass, and for a pass alone; None: as many as it is set to
    compiled   do a pass by `torch.compile` with these options; None: don't

    The batch's columns are tensors `any[N, ...]`, and so must be the output's. Raises ModuleError when the output
    is no dict, or has columns that the rollout records itself.
    """

    def __init__(
        self,
        module: Any,
        weights: PolicyWeights,
        *,
        explore: bool = True,
        flat: bool = False,
        threads: int | None = None,
        compiled: Mapping[str, Any] | None = None,
    ) -> None:
        self.module = module
        self.policy_version = weights.version
        self._weights = weights
        self._inference_mode = torch.inference_mode()  # made once: making it costs more than a small forward pass
        forward: Callable[[dict[str, Any]], dict[str, Any]] = (
            module.forward_exploration if explore else module.forward_inference
        )
        self._threads = TorchThreads(threads)
        self._passes = 0
        self._name = "forward_exploration" if explore else "forward_inference"
        self._flat = FlatForward(forward) if flat else None
        self._is_compiled = compiled is not None
        if compiled is not None:
            forward = torch.compile(forward, **compiled)
        self._forward = self._flat or forward

    def __call__(self, batches: Lane) -> Lane:
        """Replace the lane's batch by the module's output."""
        lane = batches
        try:
            lane.batch = self.forward(lane.batch)
        except Exception as error:
            note_batch(error, f"lane {lane.index}, vector step {lane.vector_steps}", lane.batch)
            raise
        lane.policy_version = self.policy_version
        return lane

    def broken_off(self, batches: Lane) -> Callable[[Lane], Lane]:
        """The call in place of a pass that was broken off: the same pass again."""
        return self

    def at_work(self, name: str) -> Iterator[Wait]:
        """A pass, which may be the first, or be compiled."""
        yield Wait(name, "call", "is in a forward pass", limit="compile" if self._is_compiled else None)

    def forward_lanes(self, lanes: Sequence[Lane]) -> None:
        """Replace each lane's batch by its `LaneOutput` of one joint pass; one lane's batch by the whole output."""
        if len(lanes) == 1:
            self(lanes[0])
            return
        sizes, shared_data = [self.rows(lane) for lane in lanes], [lane.shared_data for lane in lanes]
        where = f"lanes {', '.join(str(lane.index) for lane in lanes)}"
        parts = joint_pass(self.forward, [lane.batch for lane in lanes], sizes, shared_data, where)
        for lane, part in zip(lanes, parts, strict=True):
            lane.batch, lane.policy_version = part, self.policy_version

    def rows(self, lane: Lane) -> int:
        """Rows of a lane in a pass: its slots."""
        return lane.layout.num_slots

    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        """One pass with one version of the weights."""
        self.policy_version = self._weights.load_into(self.module)
        self._passes += 1
        # A module that does it once does it always: to look at every pass would cost as much as a small operation.
        looks = self._passes % _LOOK_EVERY == 1
        versions = _versions(batch) if looks else None
        with self._threads, self._inference_mode:
            try:
                interrupts.lets_through = True
                output = self._forward(batch)
            finally:
                interrupts.lets_through = False
        if looks and versions != _versions(batch):
            raise ModuleError(
                f"{type(self.module).__name__}.{self._name} changed a tensor of its batch in place, expected it to be "
                "only read: observations are the very rows that are recorded; x = x - 1 makes a copy, x -= 1 does not"
            ).see("module")
        if not isinstance(output, dict):
            raise ModuleError(
                f"{type(self.module).__name__}.{self._name} returned {type(output).__name__}, expected a "
                "dict of tensors such as {'action_dist_inputs': …} or {'actions': …}"
            ).see("module")
        if looks:
            self._check_names(output)
        return output

    def _check_names(self, output: Mapping[str, Any]) -> None:
        returned = f"{type(self.module).__name__}.{self._name} returned"
        if taken := sorted(_KEPT & output.keys()):
            raise ModuleError(
                f"{returned} {', '.join(map(repr, taken))}, which the rollout records itself; expected what the module "
                "makes alone, such as {'action_dist_inputs': …}, under other names, and not its batch as well"
            )
        for leaf in leaves_of(output.get(Columns.ACTION_DIST_INPUTS, ())):
            if not isinstance(leaf, torch.Tensor):
                raise ModuleError(f"{returned} 'action_dist_inputs' with a {type(leaf).__name__}, expected tensors")

    def describe(self) -> str:
        """The way a pass is done, for `explain()`, where that is not as the module has it."""
        if self._flat is None:
            return "forward pass compiled" if self._is_compiled else ""
        return "forward pass flat" if self._flat.reason is None else f"forward pass not flat: {self._flat.reason}"


class LanesForward(Protocol[L_contra]):
    """Forward passes over several lanes together, with one agent in each environment or several."""

    def rows(self, lane: L_contra) -> int:
        """Rows of a lane in a pass."""
        ...

    def forward_lanes(self, lanes: Sequence[L_contra]) -> None:
        """Do the pass; each lane gets its rows of the output. May be called again for a pass that was broken off."""
        ...


class ReadyForward(Generic[L]):
    """A node that runs the module over all lanes that are ready at a time, in one pass; it waits for none.

    forward      the pass
    max_batch    slots in one pass, at most
    """

    patience = None
    completes_again = True  # a pass that was broken off is made again

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


def _versions(batch: dict[str, Any]) -> list[int]:
    """The number of changes in place that each tensor has seen."""
    tensors = (tensor for tensor in batch.values() if type(tensor) is torch.Tensor)
    return [tensor._version for tensor in tensors if not tensor.is_inference()]
