"""Pieces that add columns of the episodes to the train batch, or a step to the episodes."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from rollflow.nodes.argument_checks import check_flags, checked_count
from rollflow.nodes.connectors.common.by_module import module_by_module
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes, SharedData
from rollflow.nodes.connectors.learner.train_steps import STEP_ADDED, TrainSteps
from rollflow.nodes.connectors.list_form import single_agent_episodes
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ColumnError, ConnectorError
from rollflow.stream.data.infos import info_of
from rollflow.stream.data.tree import leaves_of, map_tree
from rollflow.stream.episodes.multi_agent import MultiAgentEpisode
from rollflow.stream.episodes.single_agent import SealedEpisode, SingleAgentEpisode
from rollflow.stream.fragments.fragment import Fragment, FragmentEpisodes


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


class AddNextObservationsFromEpisodesToTrainBatch(ConnectorV2):
    """Adds `new_obs`, a tree of arrays `any[B, ...]`: the observation after every step, at an end the episode's last.

    Where a piece before has made the batch's `obs`, `new_obs` are made of those, and of `LAST_OBSERVATIONS`. A batch
    that has `new_obs` already stays as it is. Raises ConnectorError where `obs` and `new_obs` would be of different
    kinds.
    """

    columnar = True
    pipelines = ("learner",)
    changes_episodes = False

    @module_by_module
    def __call__(self, *, batch: Batch, episodes: Episodes, shared_data: SharedData = None, **kwargs: Any) -> Batch:
        if Columns.NEXT_OBS in batch or not len(episodes):
            return batch
        steps = TrainSteps(episodes, batch, shared_data)
        if len(steps):
            steps.put(Columns.NEXT_OBS, steps.next_observations())
        return batch


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
