"""The forward pass: of one lane, or of several in one pass, whose output is kept until each lane has taken its rows."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rollflow.nodes.connectors.connector_v2 import Batch
from rollflow.nodes.connectors.learner.train_columns import device_of
from rollflow.nodes.connectors.pipelines.connector_pipeline_v2 import note_own_pieces
from rollflow.nodes.connectors.pipelines.default_pipelines import EnvToModulePipeline, ModuleToEnvPipeline
from rollflow.nodes.modules.default_module import DefaultModule
from rollflow.nodes.modules.flat_forward import FlatForward
from rollflow.nodes.modules.policy_weights import PolicyWeights
from rollflow.nodes.modules.rl_module import with_threads
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ModuleError, RollflowError, page_on
from rollflow.stream.data.tree import leaves_of, map_tree
from rollflow.stream.fragments.lane import Lane

if TYPE_CHECKING:
    from rollflow.stream.observe.waits import Wait

_LOOK_EVERY = 64  # passes
# What torch's own context manager is made of, which takes as long as a small operation.
_inference_mode: Any = getattr(torch._C, "_InferenceMode", torch.inference_mode)
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
    flat       do a pass as the flat list of operations that it comes down to: see `FlatForward`; None: if passes are
               not compiled, for a `DefaultModule`, and for others on the CPU while they are seen to do the same
    threads    that torch uses for a pass, and for a pass alone; None: as many as it is set to
    before     make the batches, for errors
    compiled   do a pass by `torch.compile` with these options; None: don't
    note       told of ~ the number of each lane that has a pass of its own; None: nobody is

    The batch's columns are tensors `any[N, ...]`, and so must be the output's. Raises ModuleError when the output
    is no dict, or has columns that the rollout records itself.
    """

    note: Callable[[int], None] | None = None

    def __init__(
        self,
        module: Any,
        weights: PolicyWeights,
        *,
        explore: bool = True,
        flat: bool | None = None,
        threads: int | None = None,
        before: Sequence[EnvToModulePipeline] = (),
        compiled: Mapping[str, Any] | None = None,
    ) -> None:
        self.module = module
        self.policy_version = weights.version
        self._weights, self._before = weights, before
        forward: Callable[[dict[str, Any]], dict[str, Any]] = (
            module.forward_exploration if explore else module.forward_inference
        )
        self._passes = 0
        self._name = "forward_exploration" if explore else "forward_inference"
        self._flat: FlatForward | None = None
        if flat or (flat is None and compiled is None and type(module) is DefaultModule):
            self._flat = FlatForward(forward)
        elif flat is None and compiled is None and isinstance(module, nn.Module) and device_of(module).type == "cpu":
            self._flat = FlatForward(forward, module)
        self._own_forward = with_threads(threads, forward)
        self._is_compiled = compiled is not None
        if compiled is not None:
            forward = torch.compile(forward, **compiled)
        self._forward = with_threads(threads, forward if self._flat is None else self._flat.__call__)

    def __call__(self, batches: Lane) -> Lane:
        """Replace the batch of a lane, or of a `ModuleTurn`, by the module's output."""
        lane = batches
        if self.note is not None:
            self.note(~lane.index)
        try:
            lane.batch = self.forward(lane.batch)
        except Exception as error:
            note_own_pieces(error, *self._before)
            note_batch(error, lane.where, lane.batch)
            raise
        lane.policy_version = self.policy_version
        return lane

    def at_work(self, name: str) -> "Iterator[Wait]":
        """A pass, which may be the first, or be compiled."""
        from rollflow.stream.observe.waits import Wait  # a policy that acts alone has no doctor

        yield Wait(name, "call", "is in a forward pass", limit="compile" if self._is_compiled else None)

    def forward_lanes(self, lanes: Sequence[Lane]) -> None:
        """Replace each lane's batch by its `LaneOutput` of one joint pass; one lane's batch by the whole output."""
        if len(lanes) == 1:
            self(lanes[0])
            return
        self.forward_jointly(lanes, f"lanes {', '.join(str(lane.index) for lane in lanes)}")

    def forward_jointly(self, turns: Sequence[Any], where: str) -> None:
        """Do one pass over the batches of several lanes, or `ModuleTurn`s; each gets its part of the output.

        where    the lanes, for a note on an error
        """
        batch: Batch = {}
        try:
            batch = joined([turn.batch for turn in turns])
            output = self.forward(batch)
        except Exception as error:
            note_own_pieces(error, *self._before)
            note_batch(error, where, batch)
            raise
        parts: Sequence[Any] = [output]
        if len(turns) > 1:
            sizes = [len(turn.episodes) for turn in turns]
            parts = JointOutput(output, sizes, [turn.shared_data for turn in turns]).parts()
        for turn, part in zip(turns, parts, strict=True):
            turn.batch, turn.policy_version = part, self.policy_version

    def rows(self, lane: Lane) -> int:
        """Rows of a lane in a pass: the slots of its turn."""
        return len(lane.episodes)

    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        """One pass with one version of the weights."""
        self.policy_version = self._weights.load_into(self.module)
        if not self._passes % _LOOK_EVERY:
            return self._forward_watched(batch)
        self._passes += 1
        with _inference_mode(True):
            output = self._forward(batch)
        return output if type(output) is dict else self._checked(output)

    def _forward_watched(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A pass of which is looked at what a module that does it once does always: not at each, for its cost."""
        versions = _versions(batch)
        with _inference_mode(True):
            output = self._forward(batch)
        self._passes += 1
        if versions != _versions(batch):
            raise ModuleError(
                f"{type(self.module).__name__}.{self._name} changed a tensor of its batch in place, expected it to be "
                "only read: observations are the very rows that are recorded; x = x - 1 makes a copy, x -= 1 does not"
            ).see("module")
        self._check_names(self._checked(output))
        if self._flat is not None and self._flat.is_given_up:
            self._forward = self._own_forward
        return output

    def _checked(self, output: Any) -> dict[str, Any]:
        if not isinstance(output, dict):
            raise ModuleError(
                f"{type(self.module).__name__}.{self._name} returned {type(output).__name__}, expected a "
                "dict of tensors such as {'action_dist_inputs': …} or {'actions': …}"
            ).see("module")
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
        """The way a pass is done, for `explain()`, if that is not as the module has it."""
        if self._flat is None:
            return "forward pass compiled" if self._is_compiled else ""
        if self._flat.reason is not None:
            return f"forward pass not flat: {self._flat.reason}"
        return "" if self._flat.is_on_trial else "forward pass flat"


def _versions(batch: dict[str, Any]) -> list[int]:
    """The number of changes in place that each tensor has seen."""
    tensors = (tensor for tensor in batch.values() if type(tensor) is torch.Tensor)
    return [tensor._version for tensor in tensors if not tensor.is_inference()]


class JointOutput:
    """Output of a pass over several lanes, each of which has a `LaneOutput` of it.

    output         column -> tree of tensors `any[K, ...]`, the rows of one lane after those of another
    sizes          rows of each lane; K in all
    shared_data    of each lane

    Actions are made of it for all of them together if that can be; that costs little more than for one.
    """

    def __init__(self, output: Batch, sizes: Sequence[int], shared_data: Sequence[dict[str, Any]]) -> None:
        self.output = output
        self._sizes, self._shared_data = sizes, shared_data
        self._acted: Batch | None = None
        self._has_tried = False

    def parts(self) -> list["LaneOutput"]:
        """Each lane's, in their order."""
        ends = accumulate(self._sizes)
        return [(self, slice(end - size, end)) for size, end in zip(self._sizes, ends, strict=True)]

    def acted(self, pipeline: ModuleToEnvPipeline, module: Any, explore: bool) -> Batch | None:
        """Actions and all else that the pipeline makes of all of it; None if it is to be run for each lane alone."""
        if not self._has_tried:
            self._has_tried = True
            self._acted = pipeline.run_jointly(module, self.output, self._sizes, explore, self._shared_data)
        return self._acted


LaneOutput = tuple[JointOutput, slice]
"""Rows of one lane in a joint output."""


def joined(batches: Sequence[Batch]) -> Batch:
    """The rows of one batch after those of another, column -> tree of tensors `any[K, ...]`.

    Raises ModuleError if their columns differ.
    """
    names = batches[0].keys()
    if any(batch.keys() != names for batch in batches):
        columns = "; ".join(sorted({str(sorted(batch)) for batch in batches}))
        raise ModuleError(f"lanes that go into one forward pass have batches of {columns}, expected the same columns")
    return {
        name: torch.cat([batch[name] for batch in batches])
        if type(column) is torch.Tensor
        else map_tree(lambda *parts: torch.cat(parts), *(batch[name] for batch in batches))
        for name, column in batches[0].items()
    }


def note_batch(error: Exception, where: str, batch: Batch) -> None:
    """Add a note to an error of a forward pass: where it was raised, the shapes of its batch, the page that helps."""
    shapes = {name: map_tree(lambda leaf: list(leaf.shape), column) for name, column in batch.items()}
    columns = ", ".join(f"'{name}' {shape}" for name, shape in shapes.items())
    page = "" if isinstance(error, RollflowError) else f"; {page_on('module')}"
    error.add_note(f"{where}, batch: {columns}{page}")
