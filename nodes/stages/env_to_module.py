"""The stage before the forward pass: connector pieces, and the cutting of fragments."""

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np

from rollflow.nodes.connectors.common.episode_columns import states_at
from rollflow.nodes.connectors.env_to_module.observation_pieces import MeanStdFilter
from rollflow.nodes.connectors.pipelines.connector_pipeline_v2 import note_own_pieces, pieces_within, slowest_piece
from rollflow.nodes.connectors.pipelines.default_pipelines import EnvToModulePipeline
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ConnectorError, EnvError
from rollflow.stream.data.loss_ledger import Ledger
from rollflow.stream.data.ranges import finite_float32
from rollflow.stream.data.tree import Tree
from rollflow.stream.fragments.fragment import Fragment, NoFragment
from rollflow.stream.fragments.lane import Lane
from rollflow.stream.fragments.live_episode import LaneEpisodes
from rollflow.stream.fragments.ready_lane import ReadyLane

if TYPE_CHECKING:
    from rollflow.nodes.stages.rounds import LaneGates
    from rollflow.stream.multi_agent.multi_agent_fragment import AnyFragment
    from rollflow.stream.multi_agent.multi_agent_lane import MultiAgentLane
    from rollflow.stream.observe.trace import FragmentTrace

logger = logging.getLogger(__name__)

L = TypeVar("L", Lane, "MultiAgentLane")
P = TypeVar("P")


class PreparedBatch(NamedTuple):
    """Result of one lane's turn: its batch for the module, and at times a finished fragment."""

    batches: Lane | None
    fragments: Fragment | None


def check_lookback(pipeline: EnvToModulePipeline, lookback: int) -> None:
    """Raise ConnectorError if a pipeline looks back further than the steps that fragments keep."""
    if pipeline.lookback > lookback:
        raise ConnectorError(
            f"{pipeline.name} looks back {pipeline.lookback} steps, but fragments keep {lookback}; expected it to be "
            "edited before the rollout is run or put into a graph"
        ).see("lookback")


def record_first_states(episodes: LaneEpisodes, states: Tree) -> None:
    """Record the states, any[K, ...], with which episodes begin, of those that have just begun.

    A lane on a device knows them.
    """
    if episodes.lane.device is not None:
        return
    begun = np.flatnonzero(episodes.just_begun())
    if len(begun):
        episodes.lane.record_states(episodes.slots[begun], states_at(states, begun))


class CuttingStage(Generic[L, P]):
    """Lanes that come by a stage, with one agent in each environment or several, and the fragments cut from them.

    result           makes the stage's result of a lane for the next stage, or None, and a fragment, or None
    num_lanes        lanes that come by
    num_fragments    after so many fragments a lane stops; None: it never does
    ledger           counts the fragments that are cut; None: they are not counted
    relay            told of lanes that give no more fragments; None: nothing is

    note    told of the number of each lane that comes by; None: nobody is
    """

    note: Callable[[int], None] | None = None

    def __init__(
        self,
        result: Callable[[Any, Any], P],
        num_lanes: int = 1,
        num_fragments: int | None = None,
        ledger: Ledger | None = None,
        relay: "LaneGates | None" = None,
    ) -> None:
        self._result = result
        self._ready: dict[int, P] = {}  # result of each lane at nearly every vector step
        self._num_fragments = num_fragments
        self._ledger = Ledger() if ledger is None else ledger
        self._lanes: dict[int, L] = {}
        self._relay = relay
        self._going = num_lanes

    def _take_in(self, lane: L) -> None:
        """Take a lane that comes by for the first time."""
        self._lanes[lane.index] = lane
        self._ready[lane.index] = self._result(lane, None)

    def _first_result(self, lane: L) -> P | None:
        """Take in a lane; its result, if it goes on from an earlier run, in which its batch was made, else None."""
        self._take_in(lane)
        if self._num_fragments is not None and lane.sequence >= self._num_fragments:
            return self._finished(lane, None)  # in the run that was saved
        return self._ready[lane.index] if lane.is_restored else None

    def _set_aside(self, lane: L | NoFragment) -> P:
        """The result for a lane whose environments are gone for good, or for the word that it is absent.

        Its last fragment is left out, and its steps are lost, if it has what is refused: other lanes go on.
        """
        if isinstance(lane, NoFragment):
            return self._result(None, None if self._relay is None else self._relay.lane_absent(lane))
        self._going -= 1
        self._ready.pop(lane.index, None)
        last, missing = None, 0
        if self._lanes.pop(lane.index, None) is not None:
            try:
                last = self._counted(lane, lane.leave())
            except EnvError as error:
                logger.warning("the last fragment of a lane that is set aside is left out: %s", error)
                missing = 1
        if self._relay is not None:
            if missing:
                self._relay.fragment_missing(lane.index)
            last = self._relay.lane_set_aside(lane.index, lane.sequence - missing, last)
        return self._result(None, last)

    def _full(self, lane: L) -> P:
        """The result for a lane that has filled its fragment."""
        fragment = self.cut(lane)
        if self._num_fragments is None or fragment.sequence + 1 < self._num_fragments:
            return self._result(lane, fragment)
        return self._finished(lane, fragment)

    def _finished(self, lane: L, fragment: "AnyFragment | None") -> P:
        """The result for a lane that stops, with its last fragment, if that is not in the run before."""
        if self._relay is not None:
            self._relay.lane_finished(lane.index, lane.sequence)
        self._going -= 1
        return self._result(None, fragment)

    def expect(self, lanes: int) -> None:
        """Count so many more lanes that come by than at first, or fewer."""
        self._going += lanes

    @property
    def done(self) -> bool:
        """True if every lane has stopped."""
        return self._going == 0

    def finish(self) -> Iterator[P]:
        """Cut what every lane has so far; then raise EnvError for the first lane that has what is refused."""
        failures: list[EnvError] = []
        for lane in self._lanes.values():
            if not lane.at_start:
                try:
                    yield self._result(None, self.cut(lane))
                except EnvError as error:
                    failures = failures or [error]
        if failures:
            raise failures.pop()

    def take_ending(self, cause: str) -> None:
        """Take note of the cause that has ended the run."""
        self._ledger.end(cause)

    def take_trace(self, name: str, trace: "FragmentTrace | None") -> None:
        """Have the fragments that are cut be traced; None: no more."""
        self._ledger.trace = trace

    def cut(self, lane: L) -> "AnyFragment":
        """Cut what a lane has so far, and count it."""
        return self._counted(lane, lane.cut())

    def _counted(self, lane: L, fragment: "AnyFragment") -> "AnyFragment":
        """Count a fragment that was cut from a lane."""
        self._ledger.cut(fragment)
        return fragment


class EnvToModule(CuttingStage[Lane, PreparedBatch]):
    """A node that runs an env-to-module pipeline over a lane, and cuts its fragment when that is full.

    The cut comes after the pipeline, so that a fragment's last observation has been through it as all others have.

        pipeline    may change the observations of the lane's episodes, and makes the forward batch
        module      what the pieces see as `rl_module`
        explore     what the pieces see as `explore`
        metrics     what the pieces see as `metrics`
        finite      whether every reward is to be a finite number; sessions have NaN if none was given
        of_lanes    keywords of `CuttingStage`
    """

    def __init__(
        self,
        pipeline: EnvToModulePipeline,
        module: Any,
        *,
        explore: bool = True,
        metrics: Any = None,
        finite: bool = True,
        **of_lanes: Any,
    ) -> None:
        super().__init__(PreparedBatch, **of_lanes)
        self.pipeline, self._finite = pipeline, finite
        self._module, self._explore, self._metrics = module, explore, metrics

    def __call__(self, steps: Lane) -> PreparedBatch:
        """Turn the lane's newest observations into a batch for the module."""
        lane = steps
        if self.note is not None:
            self.note(lane.index)
        if lane.is_set_aside:
            return self._set_aside(lane)
        try:
            if lane.ended is not None:
                self._show_ended(lane)
            if lane.index not in self._lanes and (result := self._first_result(lane)) is not None:
                return result
            episodes, shared_data = lane.episodes, lane.shared_data
            shared_data["step"] = lane.first_step + lane.vector_steps
            batch = lane.batch = self.pipeline.run(
                self._module, {}, episodes, self._explore, shared_data, self._metrics
            )
            if Columns.STATE_IN in batch:
                record_first_states(episodes, batch[Columns.STATE_IN])
            if not episodes.is_settled:
                lane.commit()
        except Exception as error:
            note_own_pieces(error, self.pipeline)
            error.add_note(lane.where)
            raise
        if lane.is_full:
            return self._full(lane)
        return PreparedBatch(None, None) if lane.has_stopped else self._ready[lane.index]

    @property
    def slowest_piece(self) -> str:
        """Name of the piece that took most of its time."""
        return slowest_piece([self.pipeline])

    def _take_in(self, lane: Lane) -> None:
        check_lookback(self.pipeline, lane.layout.lookback)
        super()._take_in(lane)
        lane.observation_spaces = (lane.observation_spaces[0], *self.pipeline.observation_spaces)
        if isinstance(lane, ReadyLane) and self._relay is not None and self._relay.lets_run_ahead:
            lane.run_ahead(self._num_fragments)

    def _show_ended(self, lane: Lane) -> None:
        """Run the pipeline over the last observations of the episodes that have just ended."""
        ended = lane.ended
        assert ended is not None
        if self.pipeline.changes_episodes and not ended.is_repeated:
            ended.settle(lane.observation_spaces[0])
            shared_data = dict(lane.shared_data)
            self.pipeline.run(self._module, {}, ended, self._explore, shared_data, self._metrics)
        lane.commit_ended()

    def _counted(self, lane: Lane, fragment: Any) -> Any:
        """Count a fragment. Raises EnvError, with lane, slot and step, for a reward that is no finite number."""
        first_step, slots = lane.vector_steps - fragment.num_rows, lane.layout.num_slots

        def named(place: int) -> str:
            row, slot = divmod(place, slots)
            step = f"vector step {first_step + row}" if fragment.is_even else f"its step {row} in {fragment.describe()}"
            return f"lane {lane.index}, slot {slot}, {step}"

        if self._finite:
            if fragment.device is not None:
                filters = (piece.name for piece in pieces_within(self.pipeline) if isinstance(piece, MeanStdFilter))
                # First: what a module made may be why a reward is none.
                fragment.check_choices(named, self._module, next(filters, None))
            if fragment.device is None or fragment.may_have_faults:
                rewards = fragment.outline.columns[Columns.REWARDS].rows(fragment.first_row, fragment.last_row)
                finite_float32(rewards.reshape(-1), named)
        return super()._counted(lane, fragment)
