"""The steps of a train batch, from fragments or from single episodes, and pieces that add their columns."""

import abc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from rollflow.nodes.argument_checks import check_flags, checked_count
from rollflow.nodes.connectors.common.batches import BatchIndividualItems, module_by_module
from rollflow.nodes.connectors.common.episode_columns import LAST_OBSERVATIONS
from rollflow.nodes.connectors.common.tensors import as_array, tensor_of
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes, SharedData
from rollflow.nodes.connectors.list_form import is_keyed_by_episode, single_agent_episodes
from rollflow.nodes.modules.evaluating import evaluating
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ColumnError, ConnectorError, RollflowError
from rollflow.stream.data.infos import info_of
from rollflow.stream.data.tree import Tree, concatenate_trees, leaves_of, map_tree, stack_trees
from rollflow.stream.episodes.multi_agent import MultiAgentEpisode
from rollflow.stream.episodes.single_agent import SealedEpisode, SingleAgentEpisode
from rollflow.stream.fragments.fragment import Fragment, FragmentEpisodes

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


class AddColumnsFromEpisodesToTrainBatch(ConnectorV2):
    """Adds a row per step of each column:

        actions                    any[B, ...]
        rewards                    f32[B]
        terminateds, truncateds    bool[B]      True in an episode's last row only
        extra model outputs        any[B, ...]  without `state_out`

    Columns that the batch has already stay as they are; infos are left out.
    """

    columnar = True
    pipelines = ("learner",)
    changes_episodes = False

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
    """Column -> values of the episode's T steps: any[T, ...], or a list of T where the episode is in list form."""
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


class AddInfosFromEpisodesToTrainBatch(ConnectorV2):
    """Adds `infos`, a list of B dicts: the info that came with the observation before each step.

    A batch that has `infos` already stays as it is.
    """

    columnar = True
    pipelines = ("learner",)
    changes_episodes = False

    def __call__(self, *, batch: Batch, episodes: Episodes, **kwargs: Any) -> Batch:
        if Columns.INFOS in batch or not len(episodes):
            return batch
        if isinstance(episodes, FragmentEpisodes):
            batch[Columns.INFOS] = [info for fragment in episodes.fragments for info in _infos_of(fragment)]
            return batch
        self._add_of_episodes(
            batch, episodes, lambda each: {Columns.INFOS: list(each.get_infos(slice(0, len(each))))}, learns=True
        )
        return batch


def _infos_of(fragment: Fragment) -> list[dict[str, Any]]:
    """The info dict before each of a fragment's B steps, chunk by chunk."""
    slots = fragment.layout.num_slots
    places = fragment.in_chunk_order(np.arange(fragment.num_rows * slots).reshape(fragment.num_rows, slots))
    rows, slot = np.divmod(places, slots)
    rows += fragment.first_row
    return [info_of(fragment.infos[row], at) for row, at in zip(rows.tolist(), slot.tolist(), strict=True)]


class AddNextObservationsFromEpisodesToTrainBatch(StepsConnector):
    """Adds `new_obs`, a tree of arrays `any[B, ...]`: the observation after every step, at an end the episode's last.

    Where a piece before has made the batch's `obs`, `new_obs` are made of those, and of `LAST_OBSERVATIONS`. A batch
    that has `new_obs` already stays as it is. Raises ConnectorError where `obs` and `new_obs` would be of different
    kinds.
    """

    keeps = (Columns.NEXT_OBS,)

    def columns(self, steps: TrainSteps, rl_module: Any) -> dict[str, Tree]:
        return {Columns.NEXT_OBS: steps.next_observations()} if len(steps) else {}


class AddOneTsToEpisodesAndTruncate(ConnectorV2):
    """Gives every chunk one more step, and ends it there: truncated, unless it was done.

    The step repeats the last observation, info, action and extra outputs, with reward 0. Added are

        loss_mask                  bool[B]  False at the added step
        terminateds, truncateds    bool[B]  True at the last real step of an episode that had ended so

    where B counts the added steps, as lists of items. Columns that the batch has already stay as they are.

    Episodes are extended in place; a read-only one makes way, in the list, for a copy. Each agent's episode of a
    multi-agent episode is extended by itself, so that its env steps no longer match. An episode without a step stays as
    it is. Raises ConnectorError where a read-only episode is in no list.
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
