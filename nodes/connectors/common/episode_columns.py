"""Pieces that add columns of the episodes to the batch: observations, stacks of them, and where they come from."""

from dataclasses import InitVar, dataclass
from functools import partial
from typing import Any

import numpy as np
from gymnasium import spaces

from rollflow.nodes.argument_checks import checked_count
from rollflow.nodes.connectors.common.by_module import ActingOrLearning, module_by_module
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes, SharedData, Space
from rollflow.nodes.connectors.list_form import single_agent_episodes
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ColumnError, ConnectorError
from rollflow.stream.data.space import map_space
from rollflow.stream.data.tree import Tree, map_tree, stack_trees
from rollflow.stream.episodes.single_agent import SingleAgentEpisode
from rollflow.stream.fragments.fragment import FragmentEpisodes
from rollflow.stream.fragments.live_episode import LaneEpisodes

LAST_OBSERVATIONS = "last_observations"
"""Key in `shared_data` of each chunk's last observation as a learner piece rewrote it, a tree of arrays `any[C, ...]`.

A piece that makes the train batch's `obs` itself sets it, for pieces that need the value of what comes after.
"""


class AddObservationsFromEpisodesToBatch(ActingOrLearning):
    """Adds `obs`, `any[B, ...]`: each episode's last observation; before a learner, all of them but the last.

    as_learner_connector    True before a learner

    A batch that has `obs` already stays as it is. In a rollout `obs` are the very rows that are recorded, read-only.
    """

    columnar = True

    def __call__(self, *, batch: Batch, episodes: Episodes, **kwargs: Any) -> Batch:
        if Columns.OBS in batch:
            return batch
        if isinstance(episodes, LaneEpisodes) and not self.as_learner_connector:
            batch[Columns.OBS] = episodes.observations()
        elif isinstance(episodes, FragmentEpisodes) and self.as_learner_connector:
            batch[Columns.OBS] = episodes.gather(Columns.OBS)
        else:
            self._add_of_episodes(batch, episodes, self._observations, learns=self.as_learner_connector)
        return batch

    def _observations(self, episode: SingleAgentEpisode) -> dict[str, Any]:
        at = slice(0, len(episode)) if self.as_learner_connector else -1
        return {Columns.OBS: episode.get_observations(at)}


class AddLaneAndSlotToBatch(ActingOrLearning):
    """Adds `lane` and `slot`, i64[B] each: the rollout's lane that a row is of, and its environment in the lane.

    as_learner_connector    True: a row for each step of the episodes; False: a row for each episode

    A module that needs to know where a row comes from reads them from its batch; nothing is recorded. With several
    agents `slot` is the environment's number in the lane. Raises ConnectorError for an episode of no rollout.
    """

    columnar = True

    def __call__(self, *, batch: Batch, episodes: Episodes, **kwargs: Any) -> Batch:
        if isinstance(episodes, LaneEpisodes) and not self.as_learner_connector:
            slots = episodes.env_slots()
            batch[Columns.LANE] = np.full(len(slots), episodes.lane.index, np.int64)
            batch[Columns.SLOT] = slots
        elif isinstance(episodes, FragmentEpisodes) and self.as_learner_connector:
            batch[Columns.LANE] = np.repeat(episodes.lanes, episodes.lengths)
            batch[Columns.SLOT] = np.repeat(episodes.env_slots(), episodes.lengths)
        else:
            self._add_of_episodes(batch, episodes, self._numbers, learns=self.as_learner_connector)
        return batch

    def _numbers(self, episode: SingleAgentEpisode) -> dict[str, Any]:
        numbers: dict[str, Any] = {Columns.LANE: episode.lane, Columns.SLOT: episode.slot}
        for column, number in numbers.items():
            if number is None:
                raise ConnectorError(
                    f"episode '{episode.id_}' has no {column}, expected an episode that a rollout hands out, and none "
                    "that was built by hand"
                )
        if not self.as_learner_connector:
            return {column: np.int64(number) for column, number in numbers.items()}
        return {column: np.full(len(episode), number, np.int64) for column, number in numbers.items()}


@dataclass(kw_only=True, eq=False, repr=False)
class FrameStacking(ConnectorV2):
    """Puts into the batch's `obs` the last `num_frames` observations, joined on their last axis, oldest first.

        num_frames              1 or more
        multi_agent             as in RLlib; it makes no difference here: a Dict space by agent ids is like any other
        as_learner_connector    True for training: a stack for every step. The piece has to stand in both pipelines,
                                since stacks are never written into the episodes

    An item `any[h, w, c]` becomes `any[h, w, c * num_frames]`. So does every Box of one axis or more, also inside a
    Dict or Tuple. Zeros stand for observations before the episode's first. A batch that has `obs` stays as it is.

    Raises ConnectorError for spaces with other parts, and ValueError for less than one frame.
    """

    columnar = True
    changes_episodes = False

    num_frames: int = 1
    multi_agent: bool = False
    as_learner_connector: bool = False
    as_learner_conector: InitVar[bool] = False  # as an older page of RLlib's spells it

    def __post_init__(self, as_learner_conector: bool) -> None:
        self.num_frames = checked_count("num_frames", self.num_frames, 1)
        self.lookback = self.num_frames - 1
        self.as_learner_connector |= as_learner_conector

    def recompute_output_observation_space(self, input_observation_space: Space, input_action_space: Space) -> Space:
        return map_space(partial(_stacked_space, self.num_frames), input_observation_space)

    @module_by_module
    def __call__(self, *, batch: Batch, episodes: Episodes, shared_data: SharedData = None, **kwargs: Any) -> Batch:
        if Columns.OBS in batch:
            return batch
        count = self.num_frames
        shared_data = {} if shared_data is None else shared_data
        if isinstance(episodes, LaneEpisodes) and not self.as_learner_connector:
            batch[Columns.OBS] = map_tree(_joined, _recent(episodes, count))
        elif isinstance(episodes, FragmentEpisodes) and self.as_learner_connector:
            batch[Columns.OBS], shared_data[LAST_OBSERVATIONS] = _of_fragments(episodes, count)
        else:
            if self.as_learner_connector and len(episodes):
                alone = single_agent_episodes(episodes, stepped_only=False)
                shared_data[LAST_OBSERVATIONS] = stack_trees([_stack(each, len(each), count) for each in alone])
            self._add_of_episodes(batch, episodes, self._stacks, learns=self.as_learner_connector)
        return batch

    def _stacks(self, episode: SingleAgentEpisode) -> dict[str, Any]:
        if self.as_learner_connector:
            return {Columns.OBS: [_stack(episode, t, self.num_frames) for t in range(len(episode))]}
        return {Columns.OBS: _stack(episode, len(episode), self.num_frames)}


def _recent(episodes: LaneEpisodes, count: int) -> Tree:
    try:
        return episodes.recent_observations(count)
    except ValueError as error:
        raise ColumnError(
            "FrameStacking: the latest observations and those before them do not have one type: does a piece after it "
            f"rewrite observations? Put FrameStacking behind that ({error})"
        ) from None


def _of_fragments(episodes: FragmentEpisodes, count: int) -> tuple[Tree, Tree]:
    """The stack at every step, and that of each chunk's last observation."""
    frames = episodes.recent_observations(count)
    ends = np.cumsum(episodes.lengths) - 1
    last = map_tree(
        lambda leaf, newest: np.concatenate([leaf[ends, 1:], newest[:, None]], axis=1),
        frames,
        episodes.last_observations(),
    )
    return map_tree(_joined, frames), map_tree(_joined, last)


def _stack(episode: SingleAgentEpisode, t: int, count: int) -> Tree:
    """The stack at step `t`, which counts from the chunk's beginning."""
    lookback = episode.observations.lookback
    there = min(count, t + lookback + 1)
    items = [episode.get_observations(i, neg_index_as_lookback=True) for i in range(t - there + 1, t + 1)]
    zeros = map_tree(lambda leaf: np.zeros_like(np.asarray(leaf)), items[-1])
    return map_tree(lambda leaf: _joined(leaf[None])[0], stack_trees([*[zeros] * (count - there), *items]))


def _joined(frames: Any) -> Any:
    """`any[B, count, ..., c]` as `any[B, ..., count * c]`."""
    if frames.ndim < 3:
        raise ConnectorError("FrameStacking: an observation is a single number, expected arrays of one axis or more")
    beside = np.moveaxis(frames, 1, -2)
    return beside.reshape(*beside.shape[:-2], beside.shape[-2] * beside.shape[-1])


def _stacked_space(count: int, space: Space) -> Space:
    if not isinstance(space, spaces.Box) or not space.shape:
        raise ConnectorError(
            f"FrameStacking can't stack observations in {space}; expected a Box of one axis or more, or a Dict or "
            "Tuple of those"
        )
    tiles = (*[1] * (len(space.shape) - 1), count)
    low, high = np.minimum(space.low, 0), np.maximum(space.high, 0)
    return spaces.Box(np.tile(low, tiles), np.tile(high, tiles), dtype=space.dtype.type)
