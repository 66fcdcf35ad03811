"""What one forward pass over several lanes gave, until each lane has taken its rows of it."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from rollflow.nodes.connectors.connector_v2 import Batch
from rollflow.nodes.connectors.module_to_env.module_to_env_pipeline import ModuleToEnvPipeline
from rollflow.stream.lane import Lane
from rollflow.stream.tree import map_tree


class JointOutput:
    """A pass's output over several lanes, each of which has a `Part` of it.

    Actions are made of it for all of them together where that can be; that costs little more than for one.
    """

    def __init__(self, output: Batch, lanes: Sequence[Lane]) -> None:
        self.output = output
        self._sizes = [lane.layout.num_slots for lane in lanes]
        self._shared_data = [lane.shared_data for lane in lanes]
        self._acted: Batch | None = None
        self._has_tried = False

    def parts(self) -> list["Part"]:
        """Each lane's, in their order."""
        ends = accumulate(self._sizes)
        return [Part(self, end - size, end) for size, end in zip(self._sizes, ends, strict=True)]

    def acted(self, pipeline: ModuleToEnvPipeline, module: Any, explore: bool) -> Batch | None:
        """What the pipeline makes of all of it; None where it is to be run over each part alone."""
        if not self._has_tried:
            self._has_tried = True
            self._acted = pipeline.run_jointly(module, self.output, self._sizes, explore, self._shared_data)
        return self._acted


class Part(NamedTuple):
    """One lane's rows."""

    joint: JointOutput
    begin: int
    end: int

    def rows(self) -> Batch:
        """Of the output."""
        columns = self.joint.output.items()
        return {name: map_tree(lambda leaf: leaf[self.begin : self.end], column) for name, column in columns}

    def acted(self, pipeline: ModuleToEnvPipeline, module: Any, explore: bool) -> Batch | None:
        """Of what the pipeline makes of all lanes' rows; None where it is to be run over these alone."""
        acted = self.joint.acted(pipeline, module, explore)
        return None if acted is None else {name: array[self.begin : self.end] for name, array in acted.items()}
