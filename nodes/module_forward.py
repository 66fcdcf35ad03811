"""The forward pass: one lane at a time, or several ready lanes in one pass."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import anyio
import anyio.to_thread
import torch

from rollflow.nodes.flat_forward import FlatForward
from rollflow.nodes.joint_output import JointOutput
from rollflow.nodes.policy_weights import PolicyWeights
from rollflow.nodes.torch_threads import TorchThreads
from rollflow.stream.channel import Inlet, Outlet
from rollflow.stream.columns import Columns
from rollflow.stream.errors import ModuleError
from rollflow.stream.lane import Lane
from rollflow.stream.tree import leaves_of, map_tree

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
            error.add_note(f"lane {lane.index}, vector step {lane.vector_steps}, batch: {told_of_batch(lane.batch)}")
            raise
        lane.policy_version = self.policy_version
        return lane

    def forward_lanes(self, lanes: Sequence[Lane]) -> None:
        """Replace every lane's batch by its `Part` of one pass over all of them; that of one lane by the output."""
        if len(lanes) == 1:
            self(lanes[0])
            return
        batch: dict[str, Any] = {}
        try:
            batch = _joined([lane.batch for lane in lanes])
            output = self.forward(batch)
        except Exception as error:
            error.add_note(f"lanes {', '.join(str(lane.index) for lane in lanes)}, batch: {told_of_batch(batch)}")
            raise
        for lane, part in zip(lanes, JointOutput(output, lanes).parts(), strict=True):
            lane.batch, lane.policy_version = part, self.policy_version

    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        """One pass with one version of the weights."""
        self.policy_version = self._weights.load_into(self.module)
        self._passes += 1
        # A module that does it once does it always: to look at every pass would cost as much as a small operation.
        looks = self._passes % _LOOK_EVERY == 1
        versions = _versions(batch) if looks else None
        with self._threads, self._inference_mode:
            output = self._forward(batch)
        if looks and versions != _versions(batch):
            raise ModuleError(
                f"{type(self.module).__name__}.{self._name} changed a tensor of its batch in place, expected it to be "
                "only read: observations are the very rows that are recorded; x = x - 1 makes a copy, x -= 1 does not"
            )
        if not isinstance(output, dict):
            raise ModuleError(
                f"{type(self.module).__name__}.{self._name} returned {type(output).__name__}, expected a "
                "dict of tensors such as {'action_dist_inputs': …} or {'actions': …}"
            )
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
        """How a pass is done, for `explain()`, where that is not as the module has it."""
        if self._flat is None:
            return "forward pass compiled" if self._is_compiled else ""
        return "forward pass flat" if self._flat.reason is None else f"forward pass not flat: {self._flat.reason}"


class ReadyForward:
    """A node that runs the module over all lanes that are ready at a time, in one pass; it waits for none.

    forward      the pass
    max_batch    slots in one pass, at most
    """

    patience = None

    def __init__(self, forward: ModuleForward, *, max_batch: int) -> None:
        self._forward = forward
        self._max_batch = max_batch
        self._ready: list[Lane] = []

    def __call__(self, batches: Lane) -> Lane | None:
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

    def completed(self) -> Iterator[Lane]:
        """The lanes after a pass over them."""
        ready, self._ready = self._ready, []
        while ready:
            slots, count = 0, 0
            # A lane's slots go together, also where one came later that has more.
            while count < len(ready) and (not count or slots + ready[count].layout.num_slots <= self._max_batch):
                slots += ready[count].layout.num_slots
                count += 1
            self._forward.forward_lanes(ready[:count])
            yield from ready[:count]
            del ready[:count]

    def describe(self) -> str:
        """The bound of a pass, for `explain()`."""
        return f"up to {self._max_batch} slots a pass"


class GatheringForward:
    """A node that waits for what lanes are ready and runs the module over all of them in one pass.

    forward      the pass
    max_batch    slots in one pass, at most
    max_wait     seconds to wait for further lanes once one is there
    in_thread    run the pass in a worker thread, so that other lanes' environments step meanwhile
    """

    def __init__(
        self, forward: ModuleForward, *, max_batch: int, max_wait: float = 0.0, in_thread: bool = False
    ) -> None:
        self._forward = forward
        self._max_batch = max_batch
        self._max_wait = max_wait
        self._in_thread = in_thread

    async def run(self, batches: Inlet[Lane], outputs: Outlet[Lane]) -> None:
        """Gather, pass, split, until no more lanes come."""
        waiting: Lane | None = None  # came last, but did not fit into the pass before
        async for first in batches:
            waiting = first
            while waiting is not None:
                lanes, waiting = await self._gather(waiting, batches)
                if self._in_thread:
                    await anyio.to_thread.run_sync(self._forward.forward_lanes, lanes)
                else:
                    self._forward.forward_lanes(lanes)
                for lane in lanes:
                    await outputs.send(lane)

    def describe(self) -> str:
        """The bounds of a pass, for `explain()`."""
        return f"up to {self._max_batch} slots a pass, waits {self._max_wait * 1e3:g} ms"

    async def _gather(self, first: Lane, batches: Inlet[Lane]) -> tuple[list[Lane], Lane | None]:
        lanes, slots = [first], first.layout.num_slots
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
                if slots + lane.layout.num_slots > self._max_batch:
                    return lanes, lane
                lanes.append(lane)
                slots += lane.layout.num_slots
        return lanes, None


def _versions(batch: dict[str, Any]) -> list[int]:
    """How often each tensor has been changed in place."""
    tensors = (tensor for tensor in batch.values() if type(tensor) is torch.Tensor)
    return [tensor._version for tensor in tensors if not tensor.is_inference()]


def told_of_batch(batch: dict[str, Any]) -> str:
    """The shapes of a batch's columns, for a note on an error."""
    shapes = {name: map_tree(lambda leaf: list(leaf.shape), column) for name, column in batch.items()}
    return ", ".join(f"'{name}' {shape}" for name, shape in shapes.items())


def _joined(batches: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The rows of one batch after those of another. Raises ModuleError where their columns differ."""
    names = batches[0].keys()
    if any(batch.keys() != names for batch in batches):
        told = "; ".join(sorted({str(sorted(batch)) for batch in batches}))
        raise ModuleError(f"lanes that go into one forward pass have batches of {told}, expected the same columns")
    return {
        name: torch.cat([batch[name] for batch in batches])
        if type(column) is torch.Tensor
        else map_tree(lambda *parts: torch.cat(parts), *(batch[name] for batch in batches))
        for name, column in batches[0].items()
    }
