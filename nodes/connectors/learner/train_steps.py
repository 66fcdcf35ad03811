"""The steps of a train batch, from fragments or from single episodes."""

import abc
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from rollflow.nodes.connectors.common.batch_individual_items import BatchIndividualItems
from rollflow.nodes.connectors.common.by_module import module_by_module
from rollflow.nodes.connectors.common.episode_columns import LAST_OBSERVATIONS
from rollflow.nodes.connectors.common.tensors import as_array, tensor_of
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes, SharedData
from rollflow.nodes.connectors.list_form import is_keyed_by_episode, single_agent_episodes
from rollflow.nodes.modules.evaluating import evaluating
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ConnectorError, RollflowError
from rollflow.stream.data.tree import Tree, concatenate_trees, leaves_of, map_tree, stack_trees
from rollflow.stream.episodes.single_agent import SingleAgentEpisode
from rollflow.stream.fragments.fragment import FragmentEpisodes

Floats = NDArray[np.float32]


STEP_ADDED = "_added_loss_mask_for_valid_episode_ts"
"""Key in `shared_data`, True where every episode has one step that it did not take."""


class TrainSteps:
    """The steps of C chunks end to end, B in all, read alike from fragments and from single episodes.

    batch          the train batch that the chunks' columns go into
    last_made      each chunk's last observation as the piece that made the batch's `obs` rewrote it, a tree of arrays
                   any[C, ...]; None: the episodes' observations are used

    lengths        i64[C]   steps of each chunk
    lasts          i64[K]   place of each chunk's last step, of the K chunks that have one
    terminated     bool[C]  True where the chunk's last step terminated its episode
    truncated      bool[C]  True where it truncated the episode
    steps_left     i64[B]   steps from each one to its chunk's end, itself included
    """

    def __init__(self, episodes: Episodes, batch: Batch, shared_data: SharedData = None) -> None:
        self.batch = batch
        self.last_made: Tree | None = (shared_data or {}).get(LAST_OBSERVATIONS)
        self._fragments = episodes if isinstance(episodes, FragmentEpisodes) and len(episodes) else None
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
        self.lasts: NDArray[np.int64] = self._ends[self.lengths > 0] - 1
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
        """f32[B]: the batch's `rewards` where it has them, in any form, else those of the episodes.

        Raises ConnectorError for rewards that are not one for each step, and for sums over several steps.
        """
        if Columns.N_STEP in self.batch:
            raise ConnectorError(
                f"column '{Columns.REWARDS}' has sums over several steps already: pieces that need each step's reward "
                "stand before NStepReturns"
            )
        if Columns.REWARDS in self.batch:
            values = self.batched(Columns.REWARDS)
            return np.asarray(values.cpu() if torch.is_tensor(values) else values, np.float32)
        return np.asarray(self.recorded(Columns.REWARDS) if len(self) else (), np.float32)

    def finite_rewards(self) -> Floats:
        """f32[B]: `rewards`. Raises ConnectorError, with the chunk and the step, where one is NaN or infinite."""
        rewards = self.rewards()
        self.check_finite(rewards, "the reward", ConnectorError)
        return rewards

    def check_finite(self, values: Floats, what: str, error: type[RollflowError]) -> None:
        """Raise `error`, with the chunk and the step, where one of the values f32[B] is NaN or infinite."""
        if np.isfinite(np.add.reduce(values, dtype=np.float64)):
            return
        step = int(np.argmin(np.isfinite(values)))
        chunk = int(np.searchsorted(self._ends, step, side="right"))
        begin = self._ends[chunk] - self.lengths[chunk]
        raise error(
            f"episode '{self._episodes[chunk].id_}', step {int(step - begin)} of its chunk: {what} is {values[step]}, "
            "expected a finite one: all that is worked out from it would be lost"
        )

    def batched(self, column: str) -> Tree:
        """A column of the batch, in any form, as a tree of arrays or tensors `any[B, ...]`.

        Raises ConnectorError where it is not one item for each step.
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

    def last_recorded(self, name: str, chosen: NDArray[np.bool_]) -> Tree:
        """The newest item of a recorded column in the chosen chunks, a tree of arrays `any[sum(chosen), ...]`.

        name      "obs", for the observation after a chunk's last step, or one of `extra_columns`
        chosen    bool[C], not all False
        """
        if self._fragments is None:
            return stack_trees([_read(self._alone[place], name, -1) for place in np.flatnonzero(chosen)])
        last = self._fragments.last_observations() if name == Columns.OBS else self._fragments.last(name)
        return map_tree(lambda leaf: leaf[chosen], last)

    def observations(self) -> Tree:
        """`recorded("obs")`, or the batch's `obs` if it has them, then a tree of arrays or tensors `any[B, ...]`."""
        return self.batched(Columns.OBS) if Columns.OBS in self.batch else self.recorded(Columns.OBS)

    def next_observations(self) -> Tree:
        """The observation after every step, a tree of arrays `any[B, ...]`; there must be a step.

        Raises ConnectorError where the batch's `obs` are of another kind than these.
        """
        if self.last_made is not None and Columns.OBS in self.batch:
            return self.following(map_tree(as_array, self.batched(Columns.OBS)), self.last_made)
        if self._fragments is not None:
            following = self.following(self.recorded(Columns.OBS), self._fragments.last_observations())
        else:
            stepped = [episode for episode in self._alone if len(episode)]
            following = _joined([_read(episode, Columns.OBS, slice(1, len(episode) + 1)) for episode in stepped])
        self.check_kind(following)
        return following

    def check_kind(self, others: Tree) -> None:
        """Raise ConnectorError where the batch has `obs` of another kind than other observations, `any[..., ...]`."""
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

        def shifted(leaf: NDArray[Any], last: NDArray[Any]) -> NDArray[Any]:
            moved = np.empty_like(leaf)
            moved[:-1] = leaf[1:]
            moved[self.lasts] = last[self.lengths > 0]
            return moved

        return map_tree(shifted, values, after)

    def at_lasts(self, flags: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """bool[B]: flags of the chunks, bool[C], at their last steps; False at all others."""
        rows = np.zeros(len(self), np.bool_)
        rows[self.lasts] = flags[self.lengths > 0]
        return rows

    # Writing

    def put(self, column: str, values: Tree) -> None:
        """Make a tree of arrays `any[B, ...]` the batch's column, in the form that its other columns have.

        Raises ConnectorError for a batch whose columns have a time axis.
        """
        self._refuse_rows(column)
        in_list_form = is_in_list_form(self.batch)
        tensors = [leaf for data in self.batch.values() for leaf in leaves_of(data) if torch.is_tensor(leaf)]
        self.batch.pop(column, None)
        if self._fragments is not None or not in_list_form:
            self.batch[column] = tensors_of(values, tensors[0].device) if tensors else values
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


class StepsConnector(ConnectorV2):
    """Base of learner pieces that work out columns from all steps of the train batch at once, by `columns`.

    keeps          columns that stay where the batch has them; with all of them there, nothing is done
    looks_ahead    whether it works out what comes after each chunk. It then does nothing for a batch without a
                   step. It raises ConnectorError behind AddOneTsToEpisodesAndTruncate, where episodes have a step
                   that they did not take
    """

    columnar = True
    pipelines = ("learner",)
    changes_episodes = False
    keeps: ClassVar[tuple[str, ...]] = ()
    looks_ahead: ClassVar[bool] = False

    @module_by_module
    def __call__(
        self, *, rl_module: Any, batch: Batch, episodes: Episodes, shared_data: SharedData = None, **kwargs: Any
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
            for column, values in self.columns(steps, evaluating(rl_module)).items():
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
