"""Generalised advantage estimation as a learner piece (Schulman et al. 2016, arXiv:1506.02438)."""

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray

from rollflow.nodes.connectors.add_time_dim_to_batch_and_zero_pad import is_stateful
from rollflow.nodes.connectors.connector_v2 import ConnectorV2
from rollflow.stream.columns import Columns
from rollflow.stream.episode import SingleAgentEpisode
from rollflow.stream.errors import ModuleError
from rollflow.stream.fragment import Fragment, FragmentEpisodes
from rollflow.stream.tree import Tree, map_tree, stack_trees

Floats = NDArray[np.float32]


class GeneralAdvantageEstimation(ConnectorV2):
    """Adds `advantages` and `value_targets`, f32[B] each, to the train batch.

        gamma                   discount of rewards, 0 … 1
        lambda_                 weight of longer returns, 0 … 1
        normalize_advantages    shift and scale `advantages` over the batch to mean 0 and deviation 1

    Values are the recorded `vf_preds` where the module gave them, else `rl_module.compute_values(batch)` over the
    observations. The value of the observation after a chunk's last step, which is always computed anew, stands in for
    what comes after it, unless the episode terminated there: truncation and the fragment's end are no ends of
    the task. Of a stateful module the values must be recorded, and that last one is computed with the chunk's last
    `state_out`. Raises ModuleError when values are needed and the module can't compute them.
    """

    columnar = True
    changes_episodes = False

    def __init__(
        self,
        input_observation_space: gym.Space[Any] | None = None,
        input_action_space: gym.Space[Any] | None = None,
        *,
        gamma: float = 0.99,
        lambda_: float = 0.95,
        normalize_advantages: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(input_observation_space, input_action_space, **kwargs)
        self.gamma = gamma
        self.lambda_ = lambda_
        self.normalize_advantages = normalize_advantages

    def __call__(
        self,
        *,
        rl_module: Any,
        batch: dict[str, Any],
        episodes: Sequence[SingleAgentEpisode],
        explore: bool | None = None,
        shared_data: dict[str, Any] | None = None,
        metrics: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        if not len(episodes):
            return batch
        if isinstance(episodes, FragmentEpisodes):
            advantages, targets = self._of_fragments(rl_module, episodes)
        else:
            advantages, targets = self._of_episodes(rl_module, episodes)
        if self.normalize_advantages:
            advantages = (advantages - advantages.mean()) / np.maximum(advantages.std(), np.float32(1e-4))
        if isinstance(episodes, FragmentEpisodes) or not _holds_items(batch):
            as_batched = torch.from_numpy if _holds_tensors(batch) else np.asarray
            batch[Columns.ADVANTAGES], batch[Columns.VALUE_TARGETS] = (
                as_batched(advantages),
                as_batched(targets),
            )
            return batch
        begin = 0
        for episode in self.single_agent_episode_iterator(episodes):
            end = begin + len(episode)
            for column, values in ((Columns.ADVANTAGES, advantages), (Columns.VALUE_TARGETS, targets)):
                self.add_n_batch_items(batch, column, values[begin:end], end - begin, episode)
            begin = end
        return batch

    def _of_fragments(self, rl_module: Any, episodes: FragmentEpisodes) -> tuple[Floats, Floats]:
        for fragment in episodes.fragments:
            _check_values(fragment)
        lasting = np.concatenate([~fragment.chunks.terminated for fragment in episodes.fragments])
        after = np.zeros(len(lasting), np.float32)
        if lasting.any():
            observations = map_tree(lambda leaf: leaf[lasting], episodes.last_observations())
            states = None
            if is_stateful(rl_module):
                states = map_tree(lambda leaf: leaf[lasting], episodes.last(Columns.STATE_OUT))
            after[lasting] = _values(rl_module, observations, states)
        advantages, targets, begin = [], [], 0
        for fragment in episodes.fragments:
            count = len(fragment.chunks.slot)
            advantage, value = self._of_fragment(rl_module, fragment, after[begin : begin + count])
            advantages.append(fragment.in_chunk_order(advantage))
            targets.append(fragment.in_chunk_order(advantage + value))
            begin += count
        return np.concatenate(advantages), np.concatenate(targets)

    def _of_fragment(self, rl_module: Any, fragment: Fragment, after: Floats) -> tuple[Floats, Floats]:
        """Advantages and values, f32[T, N] each, over all rows: those of dead rows mean nothing."""
        chunks = fragment.chunks
        if Columns.VF_PREDS in fragment.columns:
            values = fragment.column(Columns.VF_PREDS)
        else:
            observations = fragment.column(Columns.OBS)
            flat = map_tree(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), observations)
            values = _values(rl_module, flat).reshape(fragment.num_rows, -1)
        next_values = np.empty_like(values)
        next_values[:-1] = values[1:]
        ends = np.zeros(values.shape, np.bool_)
        last = chunks.stop - 1 - fragment.first_row, chunks.slot
        next_values[last], ends[last] = after, True
        return self._advantages(fragment.column(Columns.REWARDS), values, next_values, ends), values

    def _of_episodes(self, rl_module: Any, episodes: Sequence[SingleAgentEpisode]) -> tuple[Floats, Floats]:
        alone = list(self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False))
        lasting = [episode for episode in alone if not episode.is_terminated]
        after = np.zeros(len(alone), np.float32)
        if lasting:
            observations = stack_trees([episode.get_observations(-1) for episode in lasting])
            states = None
            if is_stateful(rl_module):
                states = stack_trees([episode.get_extra_model_outputs(Columns.STATE_OUT, -1) for episode in lasting])
            after[[not episode.is_terminated for episode in alone]] = _values(rl_module, observations, states)
        advantages, targets = [], []
        for episode, next_value in zip(alone, after, strict=True):
            if Columns.VF_PREDS in episode.extra_model_outputs:
                values = np.asarray(episode.get_extra_model_outputs(Columns.VF_PREDS), np.float32)
            else:
                items = [episode.get_observations(i) for i in range(len(episode))]
                values = _values(rl_module, stack_trees(items))
            next_values = np.append(values[1:], next_value)
            ends = np.arange(len(values)) == len(values) - 1
            rewards = np.asarray(episode.get_rewards(), np.float32)
            advantage = self._advantages(rewards, values, next_values, ends)
            advantages.append(advantage)
            targets.append(advantage + values)
        return np.concatenate(advantages), np.concatenate(targets)

    def _advantages(self, rewards: Floats, values: Floats, next_values: Floats, ends: NDArray[np.bool_]) -> Floats:
        """From the last step backwards; time first, every other axis by itself.

        rewards        f32[T, ...]   for action t
        values         f32[T, ...]   of observation t
        next_values    f32[T, ...]   of observation t + 1, 0 where the episode terminated
        ends           bool[T, ...]  whether t is the last step of its chunk
        """
        gamma, carry = np.float32(self.gamma), np.float32(self.gamma * self.lambda_)
        deltas = rewards + gamma * next_values - values
        advantages = np.empty_like(deltas)
        weights = np.where(ends, np.float32(0.0), carry)
        advantage = np.zeros(deltas.shape[1:], np.float32)
        for t in range(len(deltas) - 1, -1, -1):
            advantage = deltas[t] + weights[t] * advantage
            advantages[t] = advantage
        return advantages


def _check_values(fragment: Fragment) -> None:
    shape = fragment.column(Columns.VF_PREDS).shape if Columns.VF_PREDS in fragment.columns else ()
    if len(shape) > 2:
        raise ModuleError(
            f"'{Columns.VF_PREDS}' has shape {list(shape[1:])}, expected {list(shape[1:2])}: one number for each slot; "
            "squeeze(-1) what a layer with one output gives"
        )


def _values(rl_module: Any, observations: Tree, states: Tree | None = None) -> Floats:
    """f32[B]: the module's values of a batch of observations, a tree of arrays `any[B, ...]`.

    A stateful module needs the states before them, too, a tree of arrays `any[B, ...]`.
    """
    if states is None and is_stateful(rl_module):
        raise ModuleError(
            f"GeneralAdvantageEstimation needs the values that a stateful module saw: let '{type(rl_module).__name__}' "
            f"give '{Columns.VF_PREDS}' in its forward passes"
        )
    compute_values = getattr(rl_module, "compute_values", None)
    if compute_values is None:
        raise ModuleError(
            f"GeneralAdvantageEstimation needs values, but module '{type(rl_module).__name__}' has no "
            "compute_values(batch); expected f32[B] from it for a batch of observations"
        )
    parameter = next(iter(rl_module.parameters()), None) if isinstance(rl_module, torch.nn.Module) else None
    device = torch.device("cpu") if parameter is None else parameter.device
    with torch.no_grad():
        tensors = map_tree(lambda leaf: torch.from_numpy(np.ascontiguousarray(leaf)).to(device), observations)
        batch = {Columns.OBS: tensors}
        if states is not None:
            batch = {
                Columns.OBS: map_tree(lambda leaf: leaf[:, None], tensors),
                Columns.STATE_IN: map_tree(
                    lambda leaf: torch.from_numpy(np.ascontiguousarray(leaf)).to(device), states
                ),
            }
        values: Floats = compute_values(batch).detach().cpu().numpy()
    return values.reshape(-1).astype(np.float32, copy=False)


def _holds_items(batch: dict[str, Any]) -> bool:
    """Whether the batch is still in list form, episode by episode, or empty."""
    return all(isinstance(column, dict | list) for column in batch.values())


def _holds_tensors(batch: dict[str, Any]) -> bool:
    return any(torch.is_tensor(column) for column in batch.values())
