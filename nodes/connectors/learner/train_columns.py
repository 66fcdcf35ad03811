"""The steps of a train batch, from fragments or from single episodes, and pieces that add their columns.

Advantages and value targets are by GAE (arXiv:1506.02438) and V-trace (arXiv:1802.01561), returns to the end, over n
steps, or of clipped rewards.
"""

import abc
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from rollflow.nodes.argument_checks import (
    check_flags,
    checked_count,
    checked_fraction,
    checked_number,
    checking_constructor,
)
from rollflow.nodes.connectors.common.batches import BatchIndividualItems, as_array, module_by_module, tensor_of
from rollflow.nodes.connectors.common.episode_columns import LAST_OBSERVATIONS
from rollflow.nodes.connectors.connector_v2 import Batch, ColumnPiece, ConnectorV2, Episodes, SharedData
from rollflow.nodes.connectors.list_form import is_keyed_by_episode, single_agent_episodes
from rollflow.nodes.modules.rl_module import evaluating, is_stateful
from rollflow.stream.data.cached_property import cached_property
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ColumnError, ConnectorError, ModuleError, RollflowError, more_than_one
from rollflow.stream.data.infos import info_of
from rollflow.stream.data.tree import Tree, concatenate_trees, leaves_of, library_of, map_tree, stack_trees
from rollflow.stream.episodes.multi_agent import MultiAgentEpisode
from rollflow.stream.episodes.single_agent import SealedEpisode, SingleAgentEpisode
from rollflow.stream.fragments.fragment import Fragment, FragmentEpisodes

Floats = NDArray[np.float32]
_LEAST_DEVIATION = 1e-4  # of advantages


STEP_ADDED = "_added_loss_mask_for_valid_episode_ts"
"""Key in `shared_data`, True where every episode has one step that it did not take."""


class TrainSteps:
    """The steps of C chunks end to end, B in all, read alike from fragments and from single episodes.

    Values are arrays; of fragments on a device they are tensors there. Positions are arrays in any case.

    device         of the tensors; None: values are arrays
    xp             the values' library, numpy or torch
    batch          the train batch that the chunks' columns go into
    last_made      each chunk's last observation as the piece that made the batch's `obs` rewrote it, a tree of arrays
                   any[C, ...]; None: the episodes' observations are used

    lengths        i64[C]   steps of each chunk
    lasts          i64[K]   place of each chunk's last step, of the K chunks that have one
    terminated     bool[C]  True if the chunk's last step terminated its episode
    truncated      bool[C]  True if it truncated the episode
    steps_left     i64[B]   steps from each one to its chunk's end, itself included
    """

    def __init__(self, episodes: Episodes, batch: Batch, shared_data: SharedData = None) -> None:
        self.batch = batch
        self._fragments = episodes if isinstance(episodes, FragmentEpisodes) and len(episodes) else None
        self.device: Any = None if self._fragments is None else self._fragments.device
        self.xp: Any = np if self.device is None else torch
        made = (shared_data or {}).get(LAST_OBSERVATIONS)
        self.last_made: Tree | None = made if made is None or self.device is None else tensors_of(made, self.device)
        self._alone: list[Any] = []
        if self._fragments is not None:
            self.lengths = self._fragments.lengths
            self.terminated: NDArray[np.bool_] = self._fragments.chunk_index("terminated")
            self.truncated: NDArray[np.bool_] = self._fragments.chunk_index("truncated")
        else:
            self._alone = list(single_agent_episodes(episodes, stepped_only=False))
            self.lengths = np.array([len(episode) for episode in self._alone], np.int64)
            self.terminated = np.array([episode.is_terminated for episode in self._alone], np.bool_)
            self.truncated = np.array([episode.is_truncated for episode in self._alone], np.bool_)
        self._ends = np.cumsum(self.lengths)
        self._stepped = np.flatnonzero(self.lengths > 0)
        self.lasts: NDArray[np.int64] = self._ends[self._stepped] - 1
        self._episodes: Sequence[SingleAgentEpisode] = self._alone if self._fragments is None else self._fragments

    def __len__(self) -> int:
        return int(self.lengths.sum())

    @property
    def steps_left(self) -> NDArray[np.int64]:
        left: NDArray[np.int64] = np.repeat(self._ends, self.lengths) - np.arange(len(self))
        return left

    # Reading

    @property
    def extra_columns(self) -> tuple[str, ...]:
        """Names of the extra model outputs that all chunks with a step have."""
        if self._fragments is not None:
            return self._fragments.extra_columns
        named = [episode.extra_model_outputs.keys() for episode in self._alone if len(episode)]
        return tuple(name for name in named[0] if all(name in others for others in named)) if named else ()

    def rewards(self) -> Floats:
        """f32[B]: the batch's `rewards` if it has them, in any form, else those of the episodes.

        Raises ConnectorError for rewards that are not one for each step, and for sums over several steps.
        """
        if Columns.N_STEP in self.batch:
            raise ConnectorError(
                f"column '{Columns.REWARDS}' has sums over several steps already: pieces that need each step's reward "
                "stand before NStepReturns"
            )
        if Columns.REWARDS in self.batch:
            return self.one_each(Columns.REWARDS, self.batched(Columns.REWARDS), ConnectorError)
        return self.one_each(Columns.REWARDS, self.recorded(Columns.REWARDS) if len(self) else (), ConnectorError)

    def one_each(self, column: str, values: Any, error: type[RollflowError]) -> Floats:
        """Values of all steps as f32[B]. Raises `error` if they are not one number for each step."""
        numbers: Floats = self.xp.asarray(self._ours(values), dtype=self.xp.float32)
        if numbers.ndim > 1:
            topic = "module" if error is ModuleError else "piece"
            raise error(more_than_one(column, numbers.shape, numbers.shape[:1])).see(topic)
        return numbers

    def places(self, at: NDArray[Any]) -> Any:
        """Numbers any[K], such as places i64[K] to index values by, brought to the values' device once."""
        return at if self.device is None else tensors_of(at, self.device)

    @cached_property
    def _last_places(self) -> tuple[Any, Any]:
        return self.places(self.lasts), self.places(self._stepped)

    def _ours(self, leaf: Any) -> Any:
        """An array or a tensor any[...] as these steps' values are."""
        return as_array(leaf) if self.device is None else tensors_of(leaf, self.device)

    def finite_rewards(self) -> Floats:
        """f32[B]: `rewards`. Raises ConnectorError, with the chunk and the step, if one is NaN or infinite."""
        rewards = self.rewards()
        self.check_finite(rewards, "the reward", ConnectorError)
        return rewards

    def check_finite(self, values: Floats, what: str, error: type[RollflowError]) -> None:
        """Raise `error`, with the chunk and the step, if one of the values f32[B] is NaN or infinite."""
        if math.isfinite(values.sum(dtype=self.xp.float64)):
            return
        values = as_array(values)
        step = int(np.argmin(np.isfinite(values)))
        chunk = int(np.searchsorted(self._ends, step, side="right"))
        begin = self._ends[chunk] - self.lengths[chunk]
        raise error(
            f"episode '{self._episodes[chunk].id_}', step {int(step - begin)} of its chunk: {what} is {values[step]}, "
            "expected a finite one: all that is worked out from it would be lost"
        )

    def batched(self, column: str) -> Tree:
        """A column of the batch, in any form, as a tree of arrays or tensors `any[B, ...]`.

        Raises ConnectorError if it is not one item for each step.
        """
        self._refuse_rows(column)
        alone = {column: self.batch[column]}
        made = BatchIndividualItems()(rl_module=None, batch=alone, episodes=self._episodes)[column]
        for leaf in leaves_of(made):
            if len(leaf) != len(self):
                raise ConnectorError(
                    f"column '{column}' has {len(leaf)} items, expected {len(self)}: one for each step"
                )
        return made

    def recorded(self, name: str) -> Tree:
        """The episodes' own column of all steps, a tree of arrays `any[B, ...]`; there must be a step.

        name    "obs", for the observation before every step, "actions", "rewards", or one of `extra_columns`
        """
        if self._fragments is not None:
            return self._fragments.gather(name)
        stepped = [episode for episode in self._alone if len(episode)]
        return _joined([_read(episode, name, slice(0, len(episode))) for episode in stepped])

    def last_recorded(self, name: str, chosen: NDArray[np.int64]) -> Tree:
        """The newest item of a recorded column in the chosen chunks, a tree of arrays `any[K, ...]`.

        name      "obs", for the observation after a chunk's last step, or one of `extra_columns`
        chosen    i64[K], at least one
        """
        if self._fragments is None:
            return stack_trees([_read(self._alone[place], name, -1) for place in chosen])
        last = self._fragments.last_observations() if name == Columns.OBS else self._fragments.last(name)
        return map_tree(lambda leaf: leaf[chosen], last)

    def observations(self) -> Tree:
        """`recorded("obs")`, or the batch's `obs` if it has them, then a tree of arrays or tensors `any[B, ...]`."""
        return self.batched(Columns.OBS) if Columns.OBS in self.batch else self.recorded(Columns.OBS)

    def next_observations(self) -> Tree:
        """The observation after every step, a tree of arrays `any[B, ...]`; there must be a step.

        Raises ConnectorError if the batch's `obs` are of another kind than these.
        """
        if self.last_made is not None and Columns.OBS in self.batch:
            return self.following(map_tree(self._ours, self.batched(Columns.OBS)), self.last_made)
        if self._fragments is not None:
            following = self.following(self.recorded(Columns.OBS), self._fragments.last_observations())
        else:
            stepped = [episode for episode in self._alone if len(episode)]
            following = _joined([_read(episode, Columns.OBS, slice(1, len(episode) + 1)) for episode in stepped])
        self.check_kind(following)
        return following

    def check_kind(self, others: Tree) -> None:
        """Raise ConnectorError if the batch has `obs` of another kind than other observations, `any[..., ...]`."""
        if Columns.OBS not in self.batch:
            return
        current, other = _shapes_of(self.batched(Columns.OBS)), _shapes_of(others)
        if current != other:
            raise ConnectorError(
                f"column '{Columns.OBS}' has items {current}, made by a piece, but the episodes' observations are "
                f"{other}; a piece that makes '{Columns.OBS}' leaves in shared_data['{LAST_OBSERVATIONS}'] what it "
                "makes of each chunk's last observation"
            )

    def following(self, values: Tree, after: Tree) -> Tree:
        """At every step the value of the next one, and at a chunk's last step the one of `after`.

            values    tree of arrays any[B, ...]
            after     tree of arrays any[C, ...]
        Returns a tree of new arrays `any[B, ...]`.
        """

        def shifted(leaf: Any, last: Any) -> Any:
            moved = self.xp.empty_like(leaf)
            moved[:-1] = leaf[1:]
            moved[lasts] = last[stepped]
            return moved

        lasts, stepped = self._last_places
        return map_tree(shifted, values, after)

    def at_lasts(self, flags: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """bool[B]: flags of the chunks, bool[C], at their last steps; False at all others."""
        rows = np.zeros(len(self), np.bool_)
        rows[self.lasts] = flags[self._stepped]
        return rows

    # Writing

    def put(self, column: str, values: Tree) -> None:
        """Make a tree of arrays `any[B, ...]` the batch's column, in the form that its other columns have.

        Raises ConnectorError for a batch whose columns have a time axis.
        """
        self._refuse_rows(column)
        in_list_form = is_in_list_form(self.batch)
        tensors = (leaf for data in self.batch.values() for leaf in leaves_of(data) if torch.is_tensor(leaf))
        device = self.device or next((tensor.device for tensor in tensors), None)
        self.batch.pop(column, None)
        if self._fragments is not None or not in_list_form:
            self.batch[column] = values if device is None else tensors_of(values, device)
            return
        for episode, end, length in zip(self._alone, self._ends.tolist(), self.lengths.tolist(), strict=True):
            part = map_tree(lambda leaf, a=end - length, b=end: leaf[a:b], values)
            ConnectorV2.add_n_batch_items(self.batch, column, part, length, episode)

    def _refuse_rows(self, column: str) -> None:
        if Columns.SEQ_LENS in self.batch:
            raise ConnectorError(
                f"column '{column}' has one item for each step, but the batch has rows of several: a piece that reads "
                "or adds it stands before AddTimeDimToBatchAndZeroPad"
            )


class LearnerPiece(ColumnPiece):
    """Base of built-in learner pieces."""

    on_device = False
    pipelines = ("learner",)


class StepsConnector(LearnerPiece):
    """Base of learner pieces that work out columns from all steps of the train batch at once, by `columns`.

    keeps          columns that stay if the batch has them; with all of them there, nothing is done
    looks_ahead    whether it works out what comes after each chunk. It then does nothing for a batch without a
                   step. It raises ConnectorError behind AddOneTsToEpisodesAndTruncate, if episodes have a step
                   that they did not take
    uses_module    whether it calls the module, which is then in evaluation mode
    """

    keeps: ClassVar[tuple[str, ...]] = ()
    looks_ahead: ClassVar[bool] = False
    uses_module: ClassVar[bool] = False

    @module_by_module
    def __call__(
        self, *, batch: Batch, episodes: Episodes, rl_module: Any = None, shared_data: SharedData = None, **kwargs: Any
    ) -> Batch:
        there = {column for column in self.keeps if column in batch}
        if not len(episodes) or (there and len(there) == len(self.keeps)):
            return batch
        if self.looks_ahead and shared_data and shared_data.get(STEP_ADDED):
            raise ConnectorError(
                f"{self.name} works out what comes after each chunk itself: take AddOneTsToEpisodesAndTruncate out of "
                "the pipeline, or put it behind"
            )
        steps = TrainSteps(episodes, batch, shared_data)
        if len(steps) or not self.looks_ahead:
            module = evaluating(rl_module) if self.uses_module else rl_module
            for column, values in self.columns(steps, module).items():
                if column not in there:
                    steps.put(column, values)
        return batch

    @abc.abstractmethod
    def columns(self, steps: TrainSteps, rl_module: Any) -> dict[str, Tree]:
        """Column -> its values, a tree of arrays `any[B, ...]`, from those that the steps have so far."""


def tensors_of(arrays: Tree, device: torch.device) -> Tree:
    """A tree of arrays, or of tensors, as tensors on a device; what is read-only is copied."""
    return map_tree(lambda leaf: (leaf if torch.is_tensor(leaf) else tensor_of(leaf)).to(device), arrays)


def is_in_list_form(batch: Batch) -> bool:
    """True if no column has been made an array."""
    return all(isinstance(data, list) or is_keyed_by_episode(data) for data in batch.values())


def _shapes_of(items: Tree) -> str:
    """The structure and shapes of items."""
    return str(map_tree(lambda leaf: list(leaf.shape[1:]), items))


def _read(episode: SingleAgentEpisode, name: str, at: slice | int) -> Any:
    """Items of a recorded column, or one of them."""
    if name == Columns.OBS:
        return episode.get_observations(at)
    if name == Columns.ACTIONS:
        return episode.get_actions(at)
    return episode.get_rewards(at) if name == Columns.REWARDS else episode.get_extra_model_outputs(name, at)


def _joined(parts: list[Any]) -> Tree:
    """Chunks' items, each a list or a tree of arrays, as one tree of arrays."""
    return concatenate_trees([stack_trees(part) if isinstance(part, list) else part for part in parts])


class AddColumnsFromEpisodesToTrainBatch(LearnerPiece):
    """Adds a row per step of each column:

        actions                    any[B, ...]
        rewards                    f32[B]
        terminateds, truncateds    bool[B]      True in an episode's last row only
        extra model outputs        any[B, ...]  without `state_out`

    Columns that the batch has already stay as they are; infos are left out.
    """

    def __call__(self, *, batch: Batch, episodes: Episodes, **kwargs: Any) -> Batch:
        recorded = (Columns.ACTIONS, Columns.REWARDS, Columns.TERMINATEDS, Columns.TRUNCATEDS)
        if isinstance(episodes, FragmentEpisodes):
            for column in (*recorded, *episodes.extra_columns):
                if column not in batch and column != Columns.STATE_OUT:
                    batch[column] = episodes.gather(column)
            return batch
        self._add_of_episodes(batch, episodes, _columns_of, learns=True)
        return batch


AddColumnsFromEpisodesToBatch = AddColumnsFromEpisodesToTrainBatch
"""Its older name in RLlib."""


def _columns_of(episode: SingleAgentEpisode) -> dict[str, Any]:
    """Column -> values of the episode's T steps: any[T, ...], or a list of T if the episode is in list form."""
    last = np.arange(len(episode)) == len(episode) - 1
    rewards = np.asarray(episode.get_rewards(), np.float32)
    return {
        Columns.ACTIONS: episode.get_actions(),
        Columns.REWARDS: rewards if episode.is_numpy else list(rewards),
        Columns.TERMINATEDS: (last & episode.is_terminated).tolist(),
        Columns.TRUNCATEDS: (last & episode.is_truncated).tolist(),
        **{
            key: episode.get_extra_model_outputs(key) for key in episode.extra_model_outputs if key != Columns.STATE_OUT
        },
    }


class AddInfosFromEpisodesToTrainBatch(LearnerPiece):
    """Adds `infos`, a list of B dicts: the info that came with the observation before each step.

    A batch that has `infos` already stays as it is. Raises ConnectorError for tensors, which have no infos recorded.
    """

    def __call__(self, *, batch: Batch, episodes: Episodes, **kwargs: Any) -> Batch:
        if Columns.INFOS in batch or not len(episodes):
            return batch
        if isinstance(episodes, FragmentEpisodes):
            on = next((each.device for each in episodes.fragments if each.device is not None), None)
            if on is not None:
                raise ConnectorError(
                    f"no infos are recorded of environments of tensors on {on}; expected a learner pipeline without "
                    f"{self.name}: last_extras of the environments has what the newest step gave"
                ).see("device")
            batch[Columns.INFOS] = [info for fragment in episodes.fragments for info in _infos_of(fragment)]
            return batch
        self._add_of_episodes(
            batch, episodes, lambda each: {Columns.INFOS: list(each.get_infos(slice(0, len(each))))}, learns=True
        )
        return batch


def _infos_of(fragment: Fragment) -> list[dict[str, Any]]:
    """The info dict before each of a fragment's B steps, chunk by chunk."""
    slots = fragment.layout.num_slots
    places = fragment.outline.in_chunk_order(np.arange(fragment.num_rows * slots).reshape(fragment.num_rows, slots))
    rows, slot = np.divmod(places, slots)
    rows += fragment.first_row
    return [info_of(fragment.infos[row], at) for row, at in zip(rows.tolist(), slot.tolist(), strict=True)]


class AddNextObservationsFromEpisodesToTrainBatch(LearnerPiece):
    """Adds `new_obs`, a tree of arrays `any[B, ...]`: the observation after every step, at an end the episode's last.

    If a piece before has made the batch's `obs`, `new_obs` are made of those, and of `LAST_OBSERVATIONS`. A batch
    that has `new_obs` already stays as it is. Raises ConnectorError if `obs` and `new_obs` would be of different
    kinds.
    """

    @module_by_module
    def __call__(self, *, batch: Batch, episodes: Episodes, shared_data: SharedData = None, **kwargs: Any) -> Batch:
        if Columns.NEXT_OBS in batch or not len(episodes):
            return batch
        steps = TrainSteps(episodes, batch, shared_data)
        if isinstance(episodes, FragmentEpisodes) or Columns.OBS in batch or not is_in_list_form(batch):
            if len(steps):
                steps.put(Columns.NEXT_OBS, steps.next_observations())
            return batch
        self._add_of_episodes(
            batch,
            episodes,
            lambda each: {Columns.NEXT_OBS: each.get_observations(slice(1, len(each) + 1))},
            learns=True,
        )
        return batch


class AddOneTsToEpisodesAndTruncate(ConnectorV2):
    """Gives every chunk one more step, and ends it there: truncated, unless it was done.

    The step repeats the last observation, info, action and extra outputs, with reward 0. Added are

        loss_mask                  bool[B]  False at the added step
        terminateds, truncateds    bool[B]  True at the last real step of an episode that had ended so

    if B counts the added steps, as lists of items. Columns that the batch has already stay as they are.

    Episodes are extended in place; a read-only one makes way, in the list, for a copy. Each agent's episode of a
    multi-agent episode is extended by itself, so that its env steps no longer match. An episode without a step stays as
    it is. Raises ConnectorError if a read-only episode is in no list.
    """

    columnar = False
    pipelines = ("learner",)
    replaces_episodes = True
    # False: the flag is about a rollout's ongoing episodes, and this piece extends copies that have been cut.
    changes_episodes = False

    def __call__(self, *, batch: Batch, episodes: Episodes, shared_data: SharedData = None, **kwargs: Any) -> Batch:
        there = set(batch)
        if shared_data is not None:
            shared_data[STEP_ADDED] = True
        sealed = [place for place, episode in enumerate(episodes) if _is_sealed(episode)]
        if sealed and not isinstance(episodes, list):
            raise ConnectorError(
                f"{self.name} puts copies in the place of read-only episodes, but they come as "
                f"{type(episodes).__name__}, expected a list"
            )
        if isinstance(episodes, list):
            for place in sealed:
                made = MultiAgentEpisode if isinstance(episodes[place], MultiAgentEpisode) else SingleAgentEpisode
                episodes[place] = made.from_state(episodes[place].get_state())
        for episode in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False):
            steps = len(episode)
            last = np.arange(steps + 1 if steps else 0) == steps - 1
            columns = {
                Columns.LOSS_MASK: np.arange(len(last)) < steps,
                Columns.TERMINATEDS: last & episode.is_terminated,
                Columns.TRUNCATEDS: last & episode.is_truncated,
            }
            if steps:
                _extend(episode)
            for column, items in columns.items():
                if column not in there:
                    self.add_n_batch_items(batch, column, items.tolist(), len(items), episode)
        return batch


def _is_sealed(episode: SingleAgentEpisode | MultiAgentEpisode) -> bool:
    return any(isinstance(each, SealedEpisode) for each in single_agent_episodes([episode], stepped_only=False))


def _extend(episode: SingleAgentEpisode) -> None:
    terminated, truncated = episode.is_terminated, episode.is_truncated
    # An episode that is done takes no step; add_env_step sets both anew.
    episode.is_terminated = episode.is_truncated = False
    episode.add_env_step(
        episode.get_observations(-1),
        episode.get_actions(-1),
        0.0,
        episode.get_infos(-1),
        terminated=terminated,
        truncated=truncated or not terminated,
        extra_model_outputs={key: episode.get_extra_model_outputs(key, -1) for key in episode.extra_model_outputs},
    )


def minibatches(
    batch: Mapping[str, Any],
    size: int,
    *,
    shuffle: bool = True,
    drop_last: bool = False,
    generator: torch.Generator | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield parts of a train batch with `size` rows each, which together have each row once.

        batch        column -> a tree of tensors or arrays any[B, ...], or a list of B items; `obs` among them
        size         rows of a part, from 1 on; a row of a stateful module's batch is a sequence with its `state_in`
        shuffle      True: the rows in a random order; False: in the batch's own
        drop_last    True: leave out the last part if it has fewer rows; False: yield it
        generator    of the order; None: torch's own, which `torch.manual_seed` seeds

    Of several agents, call it for the batch of each module. Raises ValueError for a size below 1, and ColumnError for
    a batch without `obs`, or with a column that has another number of rows.
    """
    check_flags(shuffle=shuffle, drop_last=drop_last)
    size = checked_count("size", size, 1)
    count = _num_rows(batch)
    if shuffle:
        rows = torch.randperm(count, generator=generator, device=generator.device if generator else None).cpu()
    else:
        rows = torch.arange(count)
    return (
        {name: _rows_of(column, part) for name, column in batch.items()}
        for part in torch.split(rows, size)
        if len(part) == size or not drop_last
    )


def _num_rows(batch: Mapping[str, Any]) -> int:
    """The number of rows of every column."""
    if Columns.OBS not in batch:
        hint = ""
        if batch and all(isinstance(each, Mapping) and Columns.OBS in each for each in batch.values()):
            hint = "; it has a batch for each module: call minibatches for each of these"
        raise ColumnError(f"the batch has columns {list(map(str, batch))}, expected '{Columns.OBS}' among them{hint}")
    count = len(leaves_of(batch[Columns.OBS])[0])
    for name, column in batch.items():
        for leaf in [column] if isinstance(column, list) else leaves_of(column):
            if len(leaf) != count:
                raise ColumnError(
                    f"column '{name}' has {len(leaf)} rows, expected {count}, as '{Columns.OBS}' has: take it out of "
                    "the batch, or give each row its part of it"
                )
    return count


def _rows_of(column: Any, rows: torch.Tensor) -> Any:
    """Some rows, i64[n], of a column."""
    if isinstance(column, list):
        return [column[row] for row in rows.tolist()]
    return map_tree(lambda leaf: leaf[rows if torch.is_tensor(leaf) else rows.numpy()], column)


def discounted_sums(values: Floats, discounts: Floats, lengths: NDArray[np.int64]) -> Floats:
    """Each step's value and the discounted sum from the next one on; a chunk's last step has its value alone.

        values       f32[B]  of all chunks' steps, end to end: an array or a tensor
        discounts    f32[B]  weight at step t of the sum from step t + 1 on, likewise
        lengths      i64[C]  steps of each chunk, B in all
    Returns f32[B].
    """
    by_length = np.argsort(-lengths, kind="stable")
    last = (np.cumsum(lengths) - 1)[by_length]
    # All chunks at once, from their last steps backwards: the longest ones come first, and stay when others are done.
    there = np.searchsorted(-lengths[by_length], -np.arange(lengths.max(initial=0)), side="left")
    begin = np.cumsum(there) - there  # of the steps that are as far from their chunks' ends, laid end to end
    back = np.repeat(np.arange(len(there)), there)
    places = last[np.arange(len(back)) - begin[back]] - back
    if torch.is_tensor(values):
        places = tensors_of(places, values.device)
    made, weights = values[places], discounts[places]
    carry = library_of(values).zeros_like(made[: there.max(initial=0)])
    for start, count in zip(begin.tolist(), there.tolist(), strict=True):
        stop = start + count
        made[start:stop] += weights[start:stop] * carry[:count]
        carry = made[start:stop]
    sums: Floats = library_of(values).empty_like(values)
    sums[places] = made
    return sums


def device_of(rl_module: Any) -> torch.device:
    """The device of the module's parameters."""
    parameter = next(iter(rl_module.parameters()), None) if isinstance(rl_module, torch.nn.Module) else None
    return torch.device("cpu") if parameter is None else parameter.device


def values_of(
    piece: str, rl_module: Any, observations: Tree, states: Tree | None = None, on: torch.device | None = None
) -> Floats:
    """f32[B]: the module's `compute_values` of a batch of observations, a tree of arrays or tensors `any[B, ...]`.

        piece     name of the asking piece, for the error
        states    before those observations, of a stateful module: a tree of arrays any[B, ...]
        on        the device to give a tensor on; None: an array is given

    Raises ModuleError if the module has no `compute_values`, or does not give one finite number for each
    observation.
    """
    name, compute_values = type(rl_module).__name__, getattr(rl_module, "compute_values", None)
    if rl_module is None:
        raise ModuleError(f"{piece} needs values, and there is no module: expected module=… where the pipeline is made")
    if compute_values is None:
        raise ModuleError(
            f"{piece} needs values, but module '{name}' has no compute_values(batch); expected f32[B] from it for a "
            "batch of observations"
        )
    device = device_of(rl_module)
    batch = {Columns.OBS: tensors_of(observations, device)}
    count = len(leaves_of(batch[Columns.OBS])[0])
    if states is not None:
        batch = {
            Columns.OBS: map_tree(lambda leaf: leaf[:, None], batch[Columns.OBS]),
            Columns.STATE_IN: tensors_of(states, device),
        }
    with torch.no_grad():
        values = compute_values(batch)
    shape = (count,) if states is None else (count, 1)
    numbers = numbers_of(values, "what compute_values gave", name, shape, on).reshape(-1)
    if not math.isfinite(numbers.sum(dtype=library_of(numbers).float64)):
        bad = np.flatnonzero(~np.isfinite(as_array(numbers)))
        raise ModuleError(
            f"compute_values of module '{name}' gave {numbers[bad[0]]} in row {bad[0]} of {count} ({len(bad)} such "
            f"rows), expected finite values; {piece} can't work with it"
        )
    return numbers


def numbers_of(
    tensor: torch.Tensor, what: str, module: str, shape: tuple[int, ...], on: torch.device | None = None
) -> Floats:
    """A tensor of the expected shape as f32[...], an array, or a tensor on a device. Raises ModuleError for others."""
    if tuple(tensor.shape) != shape:
        raise ModuleError(f"{what} of module '{module}' has shape {list(tensor.shape)}, expected {list(shape)}").see(
            "module"
        )
    floats: Any = tensor.detach().float()
    numbers: Floats = floats.cpu().numpy() if on is None else floats.to(on)
    return numbers


def values_after(piece: str, rl_module: Any, steps: TrainSteps) -> Floats:
    """f32[C]: the value of the observation after each chunk's last step, 0 if the episode terminated.

    Raises ConnectorError if that observation is of another kind than the batch's `obs`.
    """
    after: Floats = steps.places(np.zeros(len(steps.lengths), np.float32))
    lasting = np.flatnonzero(~steps.terminated & (steps.lengths > 0))
    if len(lasting):
        lasting = steps.places(lasting)
        made = steps.last_made
        last = steps.last_recorded(Columns.OBS, lasting) if made is None else map_tree(lambda leaf: leaf[lasting], made)
        steps.check_kind(last)
        states = steps.last_recorded(Columns.STATE_OUT, lasting) if is_stateful(rl_module) else None
        after[lasting] = values_of(piece, rl_module, last, states, steps.device)
    return after


@checking_constructor(lam="lambda_=…", gae_lambda="lambda_=…")
@dataclass(kw_only=True, eq=False, repr=False)
class GeneralAdvantageEstimation(StepsConnector):
    """Adds `advantages` and `value_targets`, f32[B] each, to the train batch.

        gamma                   discount of rewards, 0 … 1
        lambda_                 weight of longer returns, 0 … 1
        normalize_advantages    True: shift and scale `advantages` over the batch to mean 0 and deviation 1

    Rewards and observations are the batch's if it has them, else the episodes'. Values are the recorded `vf_preds`
    if the module gave them, else `rl_module.compute_values(batch)`.

    The value of the observation after a chunk's last step is always computed anew. It stands in for all that comes
    after, unless the episode terminated there: truncation and the fragment's end are no ends of the task. A piece
    before this one that makes `obs` itself, such as a stack, sets `shared_data["last_observations"]` to each chunk's
    last one.

    The values of a stateful module must be recorded; the one after the chunk is computed with the last `state_out`.

    Raises ConnectorError behind AddOneTsToEpisodesAndTruncate, ModuleError when values are needed and the module can't
    compute them, ValueError for a `gamma` or `lambda_` outside 0 … 1.
    """

    looks_ahead = True
    uses_module = True

    gamma: float = 0.99
    lambda_: float = 0.95
    normalize_advantages: bool = True

    def __post_init__(self) -> None:
        self.gamma = checked_fraction("gamma", self.gamma)
        self.lambda_ = checked_fraction("lambda_", self.lambda_)

    def columns(self, steps: TrainSteps, rl_module: Any) -> dict[str, Tree]:
        values = self._values(rl_module, steps)
        after = values_after(self.name, rl_module, steps)
        deltas = steps.finite_rewards() + self.gamma * steps.following(values, after) - values
        carry = steps.xp.full_like(deltas, self.gamma * self.lambda_)
        advantages = discounted_sums(deltas, carry, steps.lengths)
        targets = advantages + values
        if self.normalize_advantages:
            advantages = _normalized(advantages)
        return {Columns.ADVANTAGES: advantages, Columns.VALUE_TARGETS: targets}

    def _values(self, rl_module: Any, steps: TrainSteps) -> Floats:
        """f32[B]: the value of the observation before every step."""
        if Columns.VF_PREDS in steps.extra_columns:
            recorded = steps.one_each(Columns.VF_PREDS, steps.recorded(Columns.VF_PREDS), ModuleError)
            steps.check_finite(recorded, f"the module's '{Columns.VF_PREDS}'", ModuleError)
            return recorded
        if is_stateful(rl_module):
            raise ModuleError(
                f"{self.name} needs the values that a stateful module saw: let '{type(rl_module).__name__}' give "
                f"'{Columns.VF_PREDS}' in its forward passes"
            )
        return values_of(self.name, rl_module, steps.observations(), on=steps.device)


def _normalized(values: Any) -> Any:
    """Values f32[B], shifted and scaled; in f64, so that the order of the rows makes no difference."""
    if torch.is_tensor(values):
        wide = values.double()
        return ((wide - wide.mean()) / wide.std(correction=0).clamp(min=_LEAST_DEVIATION)).float()
    mean, deviation = values.mean(dtype=np.float64), values.std(dtype=np.float64)
    return ((values - mean) / max(deviation, _LEAST_DEVIATION)).astype(np.float32)


@checking_constructor()
@dataclass(kw_only=True, eq=False, repr=False)
class VTrace(StepsConnector):
    """Adds `value_targets` and `advantages`, f32[B] each and not normalised, corrected for actions of older weights.

        gamma         discount of rewards, 0 … 1
        rho_clip      largest importance ratio of a step in its own correction; inf: any
        c_clip        largest ratio in passing on the corrections after it
        pg_rho_clip   largest ratio in `advantages`

    With ratios rho_t of the module's probability of each action to the recorded `action_logp`, and V its values:

        vs_t          = V_t + min(rho_clip, rho_t) (r_t + gamma V_t+1 - V_t) + gamma min(c_clip, rho_t) (vs_t+1 - V_t+1)
        advantage_t   = min(pg_rho_clip, rho_t) (r_t + gamma vs_t+1 - V_t)

    After a chunk's last step, V and vs are the value of its last observation, or 0 if the episode terminated.
    Observations and rewards are the batch's if it has them, else the episodes'. A piece that makes `obs` itself sets
    `shared_data["last_observations"]` to each chunk's last one. A column that the batch has already stays as it is.

    Raises ConnectorError behind AddOneTsToEpisodesAndTruncate. Raises ModuleError for a stateful module, and if the
    module or the episodes lack a column or a method.
    """

    keeps = (Columns.VALUE_TARGETS, Columns.ADVANTAGES)
    looks_ahead = True
    uses_module = True

    gamma: float = 0.99
    rho_clip: float = 1.0
    c_clip: float = 1.0
    pg_rho_clip: float = 1.0

    def __post_init__(self) -> None:
        self.gamma = checked_fraction("gamma", self.gamma)
        for name in ("rho_clip", "c_clip", "pg_rho_clip"):
            setattr(self, name, checked_number(name, getattr(self, name), least=0, most=inf))

    def columns(self, steps: TrainSteps, rl_module: Any) -> dict[str, Tree]:
        if is_stateful(rl_module):
            raise ModuleError(
                f"VTrace can't be used with a stateful module yet, and '{type(rl_module).__name__}' is one: "
                "is_stateful() is True"
            )
        rewards, gamma, xp = steps.finite_rewards(), self.gamma, steps.xp
        with torch.no_grad():
            ratios, values = _ratios_and_values(rl_module, steps, steps.observations())
            after = values_after(self.name, rl_module, steps)
        clips = (self.rho_clip, self.c_clip, self.pg_rho_clip)
        rho, c, pg_rho = (xp.clip(ratios, None, float(np.float32(clip))) for clip in clips)
        deltas: Floats = rho * (rewards + gamma * steps.following(values, after) - values)
        discounts: Floats = gamma * c
        targets: Floats = values + discounted_sums(deltas, discounts, steps.lengths)
        errors: Floats = rewards + gamma * steps.following(targets, after) - values
        return {Columns.VALUE_TARGETS: targets, Columns.ADVANTAGES: pg_rho * errors}


def _ratios_and_values(rl_module: Any, steps: TrainSteps, observations: Tree) -> tuple[Floats, Floats]:
    """f32[B] each: ratios of each action's probability now to that when it was chosen, and the module's values."""
    if Columns.ACTION_LOGP not in steps.extra_columns:
        raise ModuleError(
            f"VTrace needs '{Columns.ACTION_LOGP}', the log-probabilities that actions were chosen with, but the "
            f"episodes have none; extra outputs: {', '.join(steps.extra_columns) or 'none'}"
        )
    name, device = type(rl_module).__name__, device_of(rl_module)
    for method in ("forward_train", "get_train_action_dist_cls"):
        if not hasattr(rl_module, method):
            raise ModuleError(f"VTrace needs the module's probabilities of actions, but '{name}' has no {method}()")
    tensors = {Columns.OBS: tensors_of(observations, device)}
    output = rl_module.forward_train(tensors)
    if Columns.ACTION_DIST_INPUTS not in output:
        raise ModuleError(
            f"VTrace needs the module's probabilities of actions, but {name}.forward_train gave {sorted(output)}, "
            f"expected '{Columns.ACTION_DIST_INPUTS}' among them"
        )
    distribution = rl_module.get_train_action_dist_cls().from_logits(output[Columns.ACTION_DIST_INPUTS])
    actions, shape, on = tensors_of(steps.recorded(Columns.ACTIONS), device), (len(steps),), steps.device
    logp = numbers_of(distribution.logp(actions), "logp of actions", name, shape, on)
    acted = steps.one_each(Columns.ACTION_LOGP, steps.recorded(Columns.ACTION_LOGP), ModuleError)
    if Columns.VF_PREDS in output:
        values = numbers_of(output[Columns.VF_PREDS], f"'{Columns.VF_PREDS}'", name, shape, on)
        steps.check_finite(values, f"the module's '{Columns.VF_PREDS}'", ModuleError)
    else:
        values = values_of("VTrace", rl_module, observations, on=on)
    with np.errstate(over="ignore"):  # an infinite ratio is clipped like any other
        ratios: Floats = steps.xp.exp(logp - acted)
    return ratios, values


@dataclass(kw_only=True, eq=False, repr=False)
class ClipRewards(StepsConnector):
    """Makes the batch's `rewards`, f32[B], those of the episodes clipped; the episodes keep theirs.

        low, high    bounds; None: no bound on this side
        sign         True: each reward's sign instead, -1, 0 or 1

    Rewards that the batch has already are clipped in place. Pieces behind this one that take rewards from the batch see
    the clipped ones. Raises ValueError if the arguments clip nothing, or contradict each other.
    """

    low: float | None = None
    high: float | None = None
    sign: bool = False

    def __post_init__(self) -> None:
        low, high, sign = self.low, self.high, self.sign
        if sign and (low is not None or high is not None):
            raise ValueError(f"sign=True leaves nothing to clip, but low is {low} and high is {high}; expected either")
        if not sign and low is None and high is None:
            raise ValueError("neither low nor high nor sign is given, expected one: nothing would be clipped")
        if not (-np.inf if low is None else low) < (np.inf if high is None else high):
            raise ValueError(f"low is {low} and high is {high}, expected low < high")

    def columns(self, steps: TrainSteps, rl_module: Any) -> dict[str, Tree]:
        rewards, xp = steps.rewards(), steps.xp
        return {Columns.REWARDS: xp.sign(rewards) if self.sign else xp.clip(rewards, self.low, self.high)}


@dataclass(kw_only=True, eq=False, repr=False)
class ComputeReturnsToGo(StepsConnector):
    """Adds `returns_to_go`, f32[B]: the discounted sum of rewards from each step to the end of its chunk.

        gamma    discount of rewards, 0 … 1

    The sum ends with the chunk, also if that was cut or truncated. The rewards are the batch's if it has them,
    else the episodes'. A batch that has `returns_to_go` already stays as it is.
    """

    keeps = (Columns.RETURNS_TO_GO,)

    gamma: float = 0.99

    def __post_init__(self) -> None:
        self.gamma = checked_fraction("gamma", self.gamma)

    def columns(self, steps: TrainSteps, rl_module: Any) -> dict[str, Tree]:
        rewards = steps.finite_rewards()
        discounts = steps.xp.full_like(rewards, self.gamma)
        return {Columns.RETURNS_TO_GO: discounted_sums(rewards, discounts, steps.lengths)}


@dataclass(kw_only=True, eq=False, repr=False)
class NStepReturns(StepsConnector):
    """Makes of every step t a transition over m = min(`n_step`, steps left in the chunk) steps.

        n_step    largest number of steps, from 1 on
        gamma     discount of rewards, 0 … 1

        rewards                    f32[B]         sum of gamma**k * r[t + k] over k < m
        new_obs                    any[B, ...]    observation t + m
        terminateds, truncateds    bool[B]        True if step t + m - 1 ended the episode so
        bootstrap_from             u8[B]          that of step t + m - 1, if episodes have it
        n_step                     i64[B]         m: the value of `new_obs` counts gamma**m

    The single rewards are the batch's if it has them, else the episodes'. The columns above are replaced, since one
    of them is wrong without the others. If a piece before has made the batch's `obs`, `new_obs` are made of those. A
    batch that has `n_step` already stays as it is.

    Raises ConnectorError behind AddOneTsToEpisodesAndTruncate. Raises ModuleError for a stateful module and more than
    one step: `next_state_in` is the state one step on.
    """

    keeps = (Columns.N_STEP,)
    looks_ahead = True

    n_step: int
    gamma: float = 0.99

    def __post_init__(self) -> None:
        self.n_step = checked_count("n_step", self.n_step, 1)
        self.gamma = checked_fraction("gamma", self.gamma)

    def columns(self, steps: TrainSteps, rl_module: Any) -> dict[str, Tree]:
        if self.n_step > 1 and is_stateful(rl_module):
            raise ModuleError(
                f"NStepReturns over {self.n_step} steps can't be used with a stateful module, and "
                f"'{type(rl_module).__name__}' is one; expected n_step=1"
            )
        rewards = steps.finite_rewards()
        spans = np.minimum(steps.steps_left, self.n_step)
        sums = steps.xp.empty_like(rewards)
        sums[:] = rewards
        for k in range(1, int(spans.max())):
            far = steps.places(np.flatnonzero(spans > k))
            sums[far] += self.gamma**k * rewards[far + k]
        latest = np.arange(len(steps)) + spans - 1
        at = steps.places(latest)
        stood_in = {name: steps.recorded(name)[at] for name in steps.extra_columns if name == Columns.BOOTSTRAP_FROM}
        return stood_in | {
            Columns.REWARDS: sums,
            Columns.NEXT_OBS: map_tree(lambda leaf: leaf[at], steps.next_observations()),
            Columns.TERMINATEDS: steps.at_lasts(steps.terminated)[latest],
            Columns.TRUNCATEDS: steps.at_lasts(steps.truncated)[latest],
            Columns.N_STEP: spans,
        }
