"""One forward pass over several lanes: their batches as one, and its output until each lane has taken its rows."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from rollflow.nodes.connectors.connector_v2 import Batch
from rollflow.nodes.connectors.pipelines.default_pipelines import ModuleToEnvPipeline
from rollflow.stream.data.errors import ModuleError, RollflowError, page_on
from rollflow.stream.data.tree import map_tree


class JointOutput:
    """Output of a pass over several lanes, each of which has a `LaneOutput` of it.

    output         column -> tree of tensors `any[K, ...]`, the rows of one lane after those of another
    sizes          rows of each lane; K in all
    shared_data    of each lane

    Actions are made of it for all of them together where that can be; that costs little more than for one.
    """

    def __init__(self, output: Batch, sizes: Sequence[int], shared_data: Sequence[dict[str, Any]]) -> None:
        self.output = output
        self._sizes, self._shared_data = sizes, shared_data
        self._acted: Batch | None = None
        self._has_tried = False

    def parts(self) -> list["LaneOutput"]:
        """Each lane's, in their order."""
        ends = accumulate(self._sizes)
        return [LaneOutput(self, end - size, end) for size, end in zip(self._sizes, ends, strict=True)]

    def acted(self, pipeline: ModuleToEnvPipeline, module: Any, explore: bool) -> Batch | None:
        """Actions and all else that the pipeline makes of all of it; None where it is to be run for each lane alone."""
        if not self._has_tried:
            self._has_tried = True
            self._acted = pipeline.run_jointly(module, self.output, self._sizes, explore, self._shared_data)
        return self._acted


class LaneOutput(NamedTuple):
    """Rows of one lane in a joint output, from `begin` to `end`."""

    joint: JointOutput
    begin: int
    end: int

    def rows(self) -> Batch:
        """The output's rows: column -> tree of tensors `any[N, ...]`."""
        columns = self.joint.output.items()
        return {name: map_tree(lambda leaf: leaf[self.begin : self.end], column) for name, column in columns}

    def acted(self, pipeline: ModuleToEnvPipeline, module: Any, explore: bool) -> Batch | None:
        """The rows of what the pipeline makes for all lanes; None where it is to be run over these alone."""
        acted = self.joint.acted(pipeline, module, explore)
        return None if acted is None else {name: array[self.begin : self.end] for name, array in acted.items()}


def joined(batches: Sequence[Batch]) -> Batch:
    """The rows of one batch after those of another, column -> tree of tensors `any[K, ...]`.

    Raises ModuleError where their columns differ.
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


def joint_pass(
    forward: Callable[[Batch], Batch],
    batches: Sequence[Batch],
    sizes: Sequence[int],
    shared_data: Sequence[dict[str, Any]],
    where: str,
) -> Sequence[Any]:
    """Do one forward pass over the batches of several lanes; each lane's part of the output, of one lane all of it.

    sizes, shared_data    of each lane, as `JointOutput` takes them
    where                 the lanes, for a note on an error
    """
    batch: Batch = {}
    try:
        batch = joined(batches)
        output = forward(batch)
    except Exception as error:
        note_batch(error, where, batch)
        raise
    return [output] if len(batches) == 1 else JointOutput(output, sizes, shared_data).parts()


def note_batch(error: Exception, where: str, batch: Batch) -> None:
    """Add a note to an error of a forward pass: where it was raised, the shapes of its batch, the page that helps."""
    shapes = {name: map_tree(lambda leaf: list(leaf.shape), column) for name, column in batch.items()}
    columns = ", ".join(f"'{name}' {shape}" for name, shape in shapes.items())
    page = "" if isinstance(error, RollflowError) else f"; {page_on('module')}"
    error.add_note(f"{where}, batch: {columns}{page}")
