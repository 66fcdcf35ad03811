"""The stage before the forward pass: connector pieces, and the cutting of fragments."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from rollflow.nodes.connectors.common.add_time_dim_to_batch_and_zero_pad import TIME_RANK_ADDED
from rollflow.nodes.connectors.connector_v2 import Batch
from rollflow.nodes.connectors.env_to_module.env_to_module_pipeline import EnvToModulePipeline
from rollflow.nodes.pace import nobody_knows
from rollflow.stream.columns import Columns
from rollflow.stream.errors import ConnectorError
from rollflow.stream.fragment import Fragment
from rollflow.stream.lane import Lane
from rollflow.stream.tree import Tree, map_tree


class Prepared(NamedTuple):
    """What one lane's turn gives: its batch for the module, and at times a finished fragment."""

    batches: Lane | None
    fragments: Fragment | None


def shapes_of(batch: Batch, leading: int) -> Tree:
    """The shape of one observation of a batch, behind so many leading axes, leaf by leaf as text."""
    return map_tree(lambda leaf: str(list(np.shape(leaf)[leading:])), batch.get(Columns.OBS))


class EnvToModule:
    """A node that runs an env-to-module pipeline over a lane, and cuts its fragment when that is full.

    The cut comes after the pipeline, so that a fragment's last observation has been through it as all others have.

        pipeline         may change the observations of the lane's episodes, and makes the forward batch
        module           what the pieces see as `rl_module`
        explore          what the pieces see as `explore`
        num_lanes        lanes that come by
        num_fragments    after so many fragments a lane stops; None: it never does
        metrics          what the pieces see as `metrics`

        gone, ended      called with a lane that has been set aside, or has given all its fragments, and how many it
                         gives in all
    """

    def __init__(
        self,
        pipeline: EnvToModulePipeline,
        module: Any,
        *,
        num_lanes: int = 1,
        explore: bool = True,
        num_fragments: int | None = None,
        metrics: Any = None,
    ) -> None:
        self.pipeline = pipeline
        self._context = {"rl_module": module, "explore": explore, "metrics": metrics}
        self._module, self._explore, self._metrics = module, explore, metrics
        self._ready: dict[int, Prepared] = {}  # what each lane comes to at nearly every vector step
        self._num_fragments = num_fragments
        self._lanes: dict[int, Lane] = {}
        self.observation_shapes: Tree = None  # of one observation, as the module gets them, from the first step on
        self.gone: Callable[[int, int], None] = nobody_knows
        self.ended: Callable[[int, int], None] = nobody_knows
        self._going = num_lanes

    def __call__(self, steps: Lane) -> Prepared:
        """Turn the lane's newest observations into a batch for the module."""
        lane = steps
        if lane.is_set_aside:
            self._going -= 1
            known = self._lanes.pop(lane.index, None) is not None
            self._ready.pop(lane.index, None)
            last = lane.leave() if known else None
            self.gone(lane.index, lane.sequence)
            return Prepared(None, last)
        try:
            return self._prepared(lane)
        except Exception as error:
            error.add_note(f"lane {lane.index}, vector step {lane.vector_steps}")
            raise

    def _prepared(self, lane: Lane) -> Prepared:
        ended = lane.ended
        if ended is not None:
            if self.pipeline.changes_episodes:
                self.pipeline(batch={}, episodes=ended, shared_data=dict(lane.shared_data), **self._context)
            lane.commit_ended()
        if lane.index not in self._lanes:
            self._check_lookback(lane)
            self._lanes[lane.index] = lane
            self._ready[lane.index] = Prepared(lane, None)
            lane.observation_spaces = (lane.observation_spaces[0], *self.pipeline.observation_spaces)
        shared_data = lane.shared_data
        shared_data["step"] = lane.vector_steps
        lane.batch = self.pipeline.run(self._module, {}, lane.episodes, self._explore, shared_data, self._metrics)
        if self.observation_shapes is None:
            self.observation_shapes = shapes_of(lane.batch, 2 if shared_data.get(TIME_RANK_ADDED) else 1)
        lane.commit()
        if not lane.is_full:
            return self._ready[lane.index]
        fragment = lane.cut()
        if self._num_fragments is None or fragment.sequence + 1 < self._num_fragments:
            return Prepared(lane, fragment)
        self.ended(lane.index, lane.sequence)
        self._going -= 1
        return Prepared(None, fragment)

    def expect(self, lanes: int) -> None:
        """Say that so many more lanes come by than was said at first."""
        self._going += lanes

    def _check_lookback(self, lane: Lane) -> None:
        if self.pipeline.lookback > lane.layout.lookback:
            raise ConnectorError(
                f"{self.pipeline.name} looks back {self.pipeline.lookback} steps, but fragments keep "
                f"{lane.layout.lookback}; expected it to be edited before the rollout is run or put into a graph"
            )

    @property
    def done(self) -> bool:
        """Whether every lane has stopped."""
        return self._going == 0

    def finish(self) -> Iterator[Prepared]:
        """Cut what every lane has so far."""
        for lane in self._lanes.values():
            if not lane.at_start:
                yield Prepared(None, lane.cut())
