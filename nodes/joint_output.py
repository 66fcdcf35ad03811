"""What one forward pass over several lanes gave, until each lane has taken its rows of it."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from rollflow.nodes.connectors.connector_v2 import Batch
from rollflow.nodes.connectors.module_to_env.module_to_env_pipeline import ModuleToEnvPipeline
from rollflow.stream.lane import Lane
from rollflow.stream.tree import map_tree


class JointOutput:
    """A pass's output over several lanes, of which each lane's `batch` becomes a `Part`.

    Actions are made of it for all of them together where that can be; that costs little more than for one.
    """

    def __init__(self, output: Batch, lanes: Sequence[Lane]) -> None:
        self._output = output
        self._sizes = [lane.layout.num_slots for lane in lanes]
        self._shared_data = [lane.shared_data for lane in lanes]
        self._acted: Batch | None = None
        self._has_tried = False
        ends = accumulate(self._sizes)
        for lane, size, end in zip(lanes, self._sizes, ends, strict=True):
            lane.batch = Part(self, end - size, end)

    def acted(self, pipeline: ModuleToEnvPipeline, module: Any, explore: bool, begin: int, end: int) -> Batch | None:
        """A part of what the pipeline makes of it; None where it is to be run over that part alone."""
        if not self._has_tried:
            self._has_tried = True
            self._acted = pipeline.run_jointly(module, self._output, self._sizes, explore, self._shared_data)
        return None if self._acted is None else {name: array[begin:end] for name, array in self._acted.items()}

    def rows(self, begin: int, end: int) -> Batch:
        """A part of the output."""
        return {name: map_tree(lambda leaf: leaf[begin:end], column) for name, column in self._output.items()}


class Part(NamedTuple):
    """One lane's rows."""

    joint: JointOutput
    begin: int
    end: int
