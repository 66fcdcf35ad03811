"""Pieces that add columns of the episodes to the batch: observations, stacks, where they come from, and states."""

from dataclasses import InitVar, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from rollflow.nodes.argument_checks import checked_count
from rollflow.nodes.connectors.common.batches import ActingOrLearning, as_array, module_by_module, with_leading_axis
from rollflow.nodes.connectors.connector_v2 import Batch, BatchedArray, ColumnPiece, Episodes, SharedData, Space
from rollflow.nodes.connectors.list_form import episode_key, is_keyed_by_episode, map_column, single_agent_episodes
from rollflow.nodes.modules.rl_module import is_stateful, max_seq_len_of
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ColumnError, ConnectorError, ModuleError
from rollflow.stream.data.space import map_space
from rollflow.stream.data.tree import Tree, concatenate_trees, library_of, map_tree, stack_trees, unstack_tree
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


@dataclass(kw_only=True, eq=False, repr=False)
class FrameStacking(ColumnPiece):
    """Puts into the batch's `obs` the last `num_frames` observations, joined on their last axis, oldest first.

        num_frames              1 or more
        multi_agent             as in RLlib; it makes no difference here: a Dict space by agent ids is like any other
        as_learner_connector    True for training: a stack for every step. The piece has to stand in both pipelines,
                                since stacks are never written into the episodes

    An item `any[h, w, c]` becomes `any[h, w, c * num_frames]`. So does every Box of one axis or more, also inside a
    Dict or Tuple. Zeros stand for observations before the episode's first. A batch that has `obs` stays as it is.

    Raises ConnectorError for spaces with other parts, and ValueError for less than one frame.
    """

    num_frames: int = 1
    multi_agent: bool = False
    as_learner_connector: bool = False
    as_learner_conector: InitVar[bool] = False  # as an older page of RLlib's spells it

    def __post_init__(self, as_learner_conector: bool) -> None:
        self.num_frames = checked_count("num_frames", self.num_frames, 1)
        self.lookback = self.num_frames - 1
        self.as_learner_connector |= as_learner_conector
        self.pipelines = ("learner" if self.as_learner_connector else "env-to-module",)

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
        lambda leaf, newest: library_of(leaf).concatenate([leaf[ends, 1:], newest[:, None]], axis=1),
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
    beside = library_of(frames).moveaxis(frames, 1, -2)
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


# For stateful modules: a time axis, and states

TIME_RANK_ADDED = "_added_single_ts_time_rank"
"""Key in `shared_data`, True where the forward batch has a time axis, which the output then loses again."""


class AddTimeDimToBatchAndZeroPad(ActingOrLearning):
    """Gives every column but the infos a time axis, for a stateful module.

        as_learner_connector    True for training

    While acting, an item `any[...]` becomes `any[1, ...]`. For training, each episode's items become rows of
    `max_seq_len` steps, `any[L, ...]`; the last row is padded on the right with zeros. Added are

        loss_mask    bool[rows, L]  False if padded
        seq_lens     i64[rows]      steps of each row without the padding

    `max_seq_len` is that of the module's `model_config`, else 20. In list form each row is one item.

    Does nothing for a module that is not stateful, and if the batch has `state_in` already. Raises ConnectorError
    for a column that does not have one item for each step.
    """

    @module_by_module
    def __call__(
        self, *, rl_module: Any, batch: Batch, episodes: Episodes, shared_data: SharedData = None, **kwargs: Any
    ) -> Batch:
        if not is_stateful(rl_module) or Columns.STATE_IN in batch:
            return batch
        if self.as_learner_connector:
            return self._in_rows(batch, episodes, max_seq_len_of(rl_module))
        for column, data in batch.items():
            if column != Columns.INFOS:
                batch[column] = map_column(data, _item_with_axis, _batch_with_axis)
        if shared_data is not None:
            shared_data[TIME_RANK_ADDED] = True
        return batch

    def _in_rows(self, batch: Batch, episodes: Episodes, length: int) -> Batch:
        if isinstance(episodes, FragmentEpisodes):
            alone: list[SingleAgentEpisode] | None = None
            lengths = episodes.lengths
        else:
            alone = list(single_agent_episodes(episodes, stepped_only=False))
            lengths = np.array([len(episode) for episode in alone], np.int64)
        steps = steps_of_rows(lengths, length)
        for column, data in batch.items():
            if column == Columns.INFOS:
                continue
            if is_keyed_by_episode(data):
                batch[column] = _keyed_rows(column, data, episodes, length)
            else:
                whole = concatenate_trees(list(map(with_leading_axis, data))) if isinstance(data, list) else data
                rows = _rows_of(f"column '{column}'", whole, steps, int(lengths.sum()))
                batch[column] = unstack_tree(rows) if isinstance(data, list) else rows
        mask = steps >= 0
        added = {Columns.SEQ_LENS: mask.sum(1)}
        if Columns.LOSS_MASK not in batch:  # one of another piece has been cut and padded like all columns
            added[Columns.LOSS_MASK] = mask
        batch |= added
        if alone is not None:
            ends = np.cumsum(num_rows(lengths, length))[:-1]
            for column in added:
                for episode, rows in zip(alone, np.split(batch.pop(column), ends), strict=False):
                    self.add_n_batch_items(batch, column, list(rows), len(rows), episode)
        return batch


def num_rows(lengths: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """i64[C]: the number of rows of `length` steps that each chunk takes up."""
    rows: NDArray[np.int64] = -(-lengths // length)
    return rows


def steps_of_rows(lengths: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """i64[rows, length]: the step at each place, of chunks laid end to end; -1 for padding."""
    rows = num_rows(lengths, length)
    chunk = np.repeat(np.arange(len(lengths)), rows)
    nth = np.arange(len(chunk)) - np.repeat(np.cumsum(rows) - rows, rows)  # row within its chunk
    within = nth[:, None] * length + np.arange(length)
    start = (np.cumsum(lengths) - lengths)[chunk]
    return np.where(within < lengths[chunk][:, None], within + start[:, None], -1)


def _rows_of(what: str, items: Tree, steps: NDArray[np.int64], count: int) -> Tree:
    """Items, a tree of arrays `any[count, ...]`, as a tree of arrays `any[rows, L, ...]`."""
    padding = steps < 0

    def laid_out(leaf: Any) -> Any:
        leaf = leaf if torch.is_tensor(leaf) else np.asarray(leaf)
        if len(leaf) != count:
            raise ConnectorError(f"{what} has {len(leaf)} items, expected {count}: one for each step")
        rows = leaf[steps]
        if torch.is_tensor(leaf):
            return rows.masked_fill_(_mask(padding, rows), 0)
        rows[padding] = 0
        return rows

    return map_tree(laid_out, items)


def _mask(mask: NDArray[np.bool_], like: Any) -> Any:
    """A mask with as many axes as an array, or as a tensor, and on its device."""
    widened = mask.reshape(*mask.shape, *[1] * (like.ndim - mask.ndim))
    return torch.as_tensor(widened, device=like.device) if torch.is_tensor(like) else widened


def _keyed_rows(column: str, data: dict[Any, list[Any]], episodes: Episodes, length: int) -> dict[Any, list[Any]]:
    """Each chunk's items as a list of rows, `any[L, ...]`; chunks of one episode take its items in order."""
    lengths: dict[Any, list[int]] = {key: [] for key in data}
    for episode in single_agent_episodes(episodes, stepped_only=False):
        lengths.setdefault(episode_key(episode), []).append(len(episode))
    rows: dict[Any, list[Any]] = {}
    for key, items in data.items():
        what, steps = (
            f"column '{column}' of episode '{key[0]}'",
            steps_of_rows(np.array(lengths[key], np.int64), length),
        )
        rows[key] = []
        if items:
            joined = concatenate_trees(list(map(with_leading_axis, items)))
            rows[key] = unstack_tree(_rows_of(what, joined, steps, sum(lengths[key])))
    return rows


def _batch_with_axis(arrays: Tree) -> Tree:
    return map_tree(lambda leaf: leaf[:, None], arrays)


def _item_with_axis(item: Tree) -> Tree:
    def widened(leaf: Any) -> Any:
        return leaf[:, None] if isinstance(leaf, BatchedArray) else np.asarray(leaf)[None]

    return map_tree(widened, item)


class AddStatesFromEpisodesToBatch(ActingOrLearning):
    """Adds `state_in` for a stateful module, `any[rows, ...]`: one state for each row, and no time axis.

        as_learner_connector    True for training

    While acting it is the episode's last `state_out`, or `rl_module.get_initial_state()` at the episode's start.

    For training it is the state before the first step of each row of `max_seq_len`. A chunk's first row has the initial
    state, as it was recorded or else as the module has it now. If the episode began before the chunk, it has the
    lookback's last `state_out`. Further rows have the `state_out` of the step before. If the batch has `new_obs`,
    `next_state_in` is the state before the row's first one of those.

    Does nothing for a module that is not stateful, and if the batch has `state_in`. Raises ConnectorError for a
    chunk without `state_out`, or without the lookback that it needs. Raises ModuleError for a module without
    `state_out`, or with one unlike its initial state.
    """

    @module_by_module
    def __call__(self, *, rl_module: Any, batch: Batch, episodes: Episodes, **kwargs: Any) -> Batch:
        if not is_stateful(rl_module) or Columns.STATE_IN in batch:
            return batch
        initial, lane = rl_module.get_initial_state(), getattr(episodes, "lane", None)
        if not self.as_learner_connector and lane is not None and lane.device is not None:
            batch[Columns.STATE_IN] = _of_tensors(episodes, lane.initial_state(initial), rl_module)
            return batch
        initial = map_tree(as_array, initial)
        if self.as_learner_connector:
            self._add_for_training(batch, episodes, initial, max_seq_len_of(rl_module))
        elif isinstance(episodes, LaneEpisodes):
            batch[Columns.STATE_IN] = _of_lane(episodes, initial, rl_module)
        else:
            for episode in self.single_agent_episode_iterator(episodes):
                self.add_batch_item(batch, Columns.STATE_IN, _latest(episode, initial, rl_module), episode)
        return batch

    def _add_for_training(self, batch: Batch, episodes: Episodes, initial: Tree, length: int) -> None:
        with_next = Columns.NEXT_OBS in batch
        if isinstance(episodes, FragmentEpisodes):
            before, after = _states_of_fragments(episodes, initial, length)
            batch[Columns.STATE_IN] = before
            if with_next:
                batch[Columns.NEXT_STATE_IN] = after
            return
        for episode in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False):
            if not len(episode):
                continue
            before, after = _states_of_episode(episode, initial, length)
            rows = -(-len(episode) // length)
            self.add_n_batch_items(batch, Columns.STATE_IN, before, rows, episode)
            if with_next:
                self.add_n_batch_items(batch, Columns.NEXT_STATE_IN, after, rows, episode)


def states_at(states: Tree, rows: NDArray[np.int64]) -> Tree:
    """Some rows, i64[K], of a batch's `state_in`: a tree of new arrays `any[K, ...]`."""
    return map_tree(lambda leaf: np.array(as_array(leaf[rows])), states)


def _of_lane(episodes: LaneEpisodes, initial: Tree, rl_module: Any) -> Tree:
    begun, previous = episodes.just_begun(), episodes.values_before(Columns.STATE_OUT)
    if previous is None and not begun.all():
        raise _without_state_out(rl_module)
    if previous is None:
        return map_tree(lambda leaf: np.repeat(leaf[None], len(begun), axis=0), initial)
    _check_like(previous, initial, 1, rl_module)
    if not begun.any():
        return map_tree(np.array, previous)

    def merged(state: NDArray[Any], first: NDArray[Any]) -> NDArray[Any]:
        state = state.copy()
        state[begun] = first
        return state

    return map_tree(merged, previous, initial)


def _of_tensors(episodes: Any, initial: Tree, rl_module: Any) -> Tree:
    """As `_of_lane`, of a lane on a device."""
    begun, previous = episodes.just_begun(), episodes.values_before(Columns.STATE_OUT)
    if previous is None and episodes.lane.vector_steps:
        raise _without_state_out(rl_module)
    if previous is None:
        return map_tree(lambda leaf: leaf.expand(len(begun), *leaf.shape).clone(), initial)
    _check_like(previous, initial, 1, rl_module)
    return map_tree(
        lambda state, first: torch.where(begun.view(-1, *[1] * first.ndim), first, state), previous, initial
    )


def _latest(episode: SingleAgentEpisode, initial: Tree, rl_module: Any) -> Tree:
    if not episode.rewards.total():
        return initial
    if Columns.STATE_OUT not in episode.extra_model_outputs:
        raise _without_state_out(rl_module)
    state = map_tree(as_array, episode.get_extra_model_outputs(Columns.STATE_OUT, -1))
    _check_like(state, initial, 0, rl_module)
    return state


def _check_like(states: Tree, initial: Tree, leading: int, rl_module: Any) -> None:
    """Raise ModuleError unless states have the initial one's structure, dtypes and shapes behind the leading axes."""
    actual = map_tree(lambda leaf: (leaf.dtype, leaf.shape[leading:]), states)
    expected = map_tree(lambda leaf: (leaf.dtype, leaf.shape), initial)
    if actual != expected:
        raise ModuleError(
            f"module '{type(rl_module).__name__}' gave '{Columns.STATE_OUT}' {_kind(states, leading)}, expected "
            f"{_kind(initial, 0)}, as its get_initial_state() has"
        ).see("memory")


def _kind(states: Tree, leading: int) -> Tree:
    return map_tree(lambda leaf: f"{leaf.dtype}{list(leaf.shape[leading:])}", states)


def _without_state_out(rl_module: Any) -> ModuleError:
    return ModuleError(
        f"module '{type(rl_module).__name__}' has an initial state, but its forward pass gave no "
        f"'{Columns.STATE_OUT}'; expected it among the outputs of every step"
    )


def _states_of_fragments(episodes: FragmentEpisodes, initial: Tree, length: int) -> tuple[Tree, Tree]:
    """`state_in` and `next_state_in`, trees of arrays `any[rows, ...]`."""
    lengths, t_started = episodes.lengths, episodes.chunk_index("t_started")
    continued = t_started > 0
    blind = np.flatnonzero(continued & (episodes.chunk_index("lookback") == 0))
    if len(blind):
        raise _without_lookback(episodes[int(blind[0])])
    rows = num_rows(lengths, length)
    begin = np.cumsum(lengths) - lengths  # of each chunk, in steps
    first_row = np.cumsum(rows) - rows
    nth = np.arange(int(rows.sum())) - np.repeat(first_row, rows)
    start = np.repeat(begin, rows) + nth * length  # the step that each row begins with

    recorded, known = episodes.initial_states(initial)

    def before(states: Any, preceding: Any, first: Any, own: Any) -> Any:
        state_in, xp = states[np.maximum(start - 1, 0)], library_of(states)
        if xp is torch:
            own = torch.as_tensor(own, device=first.device)
        begins = xp.where(_mask(known, first), first, own)
        state_in[first_row] = xp.where(_mask(continued, first), preceding, begins)
        return state_in

    states = episodes.gather(Columns.STATE_OUT)
    state_in = map_tree(before, states, episodes.preceding(Columns.STATE_OUT), recorded, initial)
    return state_in, map_tree(lambda leaf: leaf[start], states)


def _states_of_episode(episode: SingleAgentEpisode, initial: Tree, length: int) -> tuple[Tree, Tree]:
    """`state_in` and `next_state_in` of each row: lists; trees of arrays any[rows, ...] for an episode of arrays."""
    states = episode.extra_model_outputs.get(Columns.STATE_OUT)
    if states is None:
        raise ConnectorError(
            f"episode '{episode.id_}' has no extra model output '{Columns.STATE_OUT}', which a stateful module needs; "
            f"it has: {', '.join(episode.extra_model_outputs) or 'none'}"
        )
    if episode.t_started > 0 and not states.lookback:
        raise _without_lookback(episode)
    own = initial if episode.initial_state is None else episode.initial_state
    first = states.get(-1, neg_index_as_lookback=True) if states.lookback else own
    out = [states.get(t) for t in range(len(episode))]
    before, after = [first, *out[length - 1 : -1 : length]], out[::length]
    return (stack_trees(before), stack_trees(after)) if episode.is_numpy else (before, after)


def _without_lookback(episode: SingleAgentEpisode) -> ConnectorError:
    return ConnectorError(
        f"episode '{episode.id_}': the chunk from step {episode.t_started} on has no lookback, so the state before it "
        "is not known; a stateful module needs a lookback of at least 1"
    )
