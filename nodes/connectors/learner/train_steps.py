"""The steps of a train batch, whichever form its episodes come in."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollflow.nodes.connectors.agents import is_keyed_by_episode, single_agent_episodes
from rollflow.nodes.connectors.common.add_observations_from_episodes_to_batch import LAST_OBSERVATIONS
from rollflow.nodes.connectors.common.batch_individual_items import BatchIndividualItems
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes
from rollflow.stream.columns import Columns
from rollflow.stream.episode import SingleAgentEpisode
from rollflow.stream.errors import ConnectorError
from rollflow.stream.fragment_episodes import FragmentEpisodes
from rollflow.stream.tree import Tree, concatenate_trees, leaves_of, map_tree, stack_trees

Floats = NDArray[np.float32]


class TrainSteps:
    """The steps of C chunks end to end, B in all, read alike from fragments and from episodes one by one.

    lengths        i64[C]   steps of each chunk
    lasts          i64[K]   place of each chunk's last step, of the K chunks that have one
    terminated     bool[C]  whether the chunk's last step ended its episode
    truncated      bool[C]  likewise
    steps_left     i64[B]   steps from each one to its chunk's end, itself included
    """

    def __init__(self, episodes: Episodes) -> None:
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

    def rewards(self, batch: Batch) -> Floats:
        """f32[B]: the batch's `rewards` where it has them, in whatever form, else those of the episodes.

        Raises ConnectorError for rewards that are not one for each step, and for sums over several steps.
        """
        if Columns.N_STEP in batch:
            raise ConnectorError(
                f"column '{Columns.REWARDS}' has sums over several steps already: pieces that need each step's reward "
                "stand before NStepReturns"
            )
        if Columns.REWARDS not in batch:
            if not len(self):
                return np.zeros(0, np.float32)
            if self._fragments is not None:
                rewards: Floats = self._fragments.gather(Columns.REWARDS)
                return rewards
            return np.concatenate([np.asarray(episode.get_rewards(), np.float32) for episode in self._alone])
        given = self.batched(batch, Columns.REWARDS)
        return np.asarray(given.cpu() if torch.is_tensor(given) else given, np.float32)

    def finite_rewards(self, batch: Batch) -> Floats:
        """As `rewards`. Raises ConnectorError, with the chunk and the step, where one is NaN or infinite."""
        rewards = self.rewards(batch)
        if not np.isfinite(np.add.reduce(rewards, dtype=np.float64)):
            step = int(np.argmin(np.isfinite(rewards)))
            chunk = int(np.searchsorted(self._ends, step, side="right"))
            begin = self._ends[chunk] - self.lengths[chunk]
            raise ConnectorError(
                f"episode '{self._episodes[chunk].id_}', step {int(step - begin)} of its chunk: the reward is "
                f"{rewards[step]}, expected a finite one: all that is worked out from it would be lost"
            )
        return rewards

    def batched(self, batch: Batch, column: str) -> Tree:
        """What the batch has of a column, in whatever form, as a tree of arrays or tensors `any[B, ...]`.

        Raises ConnectorError where it is not one item for each step.
        """
        _refuse_rows(batch, column)
        given = {column: batch[column]}
        made = BatchIndividualItems()(rl_module=None, batch=given, episodes=self._episodes)[column]
        for leaf in leaves_of(made):
            if len(leaf) != len(self):
                raise ConnectorError(
                    f"column '{column}' has {len(leaf)} items, expected {len(self)}: one for each step"
                )
        return made

    def actions(self) -> Tree:
        """A tree of arrays `any[B, ...]`; there must be a step."""
        if self._fragments is not None:
            return self._fragments.gather(Columns.ACTIONS)
        return _joined([episode.get_actions() for episode in self._alone if len(episode)])

    def extra_output(self, name: str) -> Tree:
        """One of `extra_columns`, a tree of arrays `any[B, ...]`."""
        if self._fragments is not None:
            return self._fragments.gather(name)
        return _joined([episode.get_extra_model_outputs(name) for episode in self._alone if len(episode)])

    def observations(self) -> Tree:
        """The observation before every step, a tree of arrays `any[B, ...]`; there must be a step."""
        if self._fragments is not None:
            return self._fragments.gather(Columns.OBS)
        stepped = [episode for episode in self._alone if len(episode)]
        return _joined([episode.get_observations(slice(0, len(episode))) for episode in stepped])

    def next_observations(self, batch: Batch, made: Tree | None) -> Tree:
        """The observation after every step, a tree of arrays `any[B, ...]`; there must be a step.

            made    what a piece made of each chunk's last observation when it made the batch's `obs`, a tree of arrays
                    any[C, ...]; None: the episodes' observations are the ones wanted

        Raises ConnectorError where the batch's `obs` are of another kind than these.
        """
        if made is not None and Columns.OBS in batch:
            return self.following(map_tree(_array, self.batched(batch, Columns.OBS)), made)
        if self._fragments is not None:
            following = self.following(self._fragments.gather(Columns.OBS), self._fragments.last_observations())
        else:
            stepped = [episode for episode in self._alone if len(episode)]
            following = _joined([episode.get_observations(slice(1, len(episode) + 1)) for episode in stepped])
        self.check_kind(batch, following)
        return following

    def check_kind(self, batch: Batch, others: Tree) -> None:
        """Raise ConnectorError where the batch has `obs` of another kind than other observations, `any[..., ...]`."""
        if Columns.OBS not in batch:
            return
        current, other = _told(self.batched(batch, Columns.OBS)), _told(others)
        if current != other:
            raise ConnectorError(
                f"column '{Columns.OBS}' has items {current}, made by a piece, but the episodes' observations are "
                f"{other}; a piece that makes '{Columns.OBS}' leaves in shared_data['{LAST_OBSERVATIONS}'] what it "
                "makes of each chunk's last observation"
            )

    def last_observations(self, chosen: NDArray[np.bool_]) -> Tree:
        """The observation after the last step of the chosen chunks, a tree of arrays `any[sum(chosen), ...]`.

        chosen    bool[C], not all False
        """
        if self._fragments is not None:
            return map_tree(lambda leaf: leaf[chosen], self._fragments.last_observations())
        return stack_trees([self._alone[place].get_observations(-1) for place in np.flatnonzero(chosen)])

    def last_output(self, name: str, chosen: NDArray[np.bool_]) -> Tree:
        """An extra output of the last step of the chosen chunks, a tree of arrays `any[sum(chosen), ...]`."""
        if self._fragments is not None:
            return map_tree(lambda leaf: leaf[chosen], self._fragments.last(name))
        return stack_trees([self._alone[place].get_extra_model_outputs(name, -1) for place in np.flatnonzero(chosen)])

    def following(self, values: Tree, after: Tree) -> Tree:
        """At every step the value of the next one, and at a chunk's last step what comes after it.

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

    def put(self, batch: Batch, column: str, values: Tree) -> None:
        """Make a tree of arrays `any[B, ...]` the batch's column, in the form that its other columns have.

        Raises ConnectorError for a batch whose columns have a time axis.
        """
        _refuse_rows(batch, column)
        in_list_form = is_in_list_form(batch)
        tensors = [leaf for data in batch.values() for leaf in leaves_of(data) if torch.is_tensor(leaf)]
        batch.pop(column, None)
        if self._fragments is not None or not in_list_form:
            batch[column] = tensors_of(values, tensors[0].device) if tensors else values
            return
        for episode, end, length in zip(self._alone, self._ends.tolist(), self.lengths.tolist(), strict=True):
            part = map_tree(lambda leaf, a=end - length, b=end: leaf[a:b], values)
            ConnectorV2.add_n_batch_items(batch, column, part, length, episode)


def tensors_of(arrays: Tree, device: torch.device) -> Tree:
    """A tree of arrays, or of tensors, as tensors on a device; what is read-only is copied."""

    def tensor(leaf: Any) -> torch.Tensor:
        # torch can't share what is read-only, of which it warns, or what runs backwards.
        given = leaf if torch.is_tensor(leaf) else torch.from_numpy(np.require(leaf, requirements=["C", "W"]))
        return given.to(device)

    return map_tree(tensor, arrays)


def is_in_list_form(batch: Batch) -> bool:
    """Whether no column has been made an array."""
    return all(isinstance(data, list) or is_keyed_by_episode(data) for data in batch.values())


def _refuse_rows(batch: Batch, column: str) -> None:
    if Columns.SEQ_LENS in batch:
        raise ConnectorError(
            f"column '{column}' has one item for each step, but the batch has rows of several: a piece that reads or "
            "adds it stands before AddTimeDimToBatchAndZeroPad"
        )


def _array(leaf: Any) -> Any:
    return leaf.cpu().numpy() if torch.is_tensor(leaf) else np.asarray(leaf)


def _told(items: Tree) -> str:
    """The structure and shapes of items."""
    return str(map_tree(lambda leaf: list(leaf.shape[1:]), items))


def _joined(parts: list[Any]) -> Tree:
    """Chunks' items, each a list or a tree of arrays, as one tree of arrays."""
    return concatenate_trees([stack_trees(part) if isinstance(part, list) else part for part in parts])
