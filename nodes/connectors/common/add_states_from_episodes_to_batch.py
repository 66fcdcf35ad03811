"""States of stateful modules, out of the episodes."""

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray

from rollflow.nodes.connectors.by_module import module_by_module
from rollflow.nodes.connectors.common.add_time_dim_to_batch_and_zero_pad import num_rows
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes
from rollflow.nodes.connectors.stateful import is_stateful, max_seq_len_of
from rollflow.stream.columns import Columns
from rollflow.stream.episode import SingleAgentEpisode
from rollflow.stream.errors import ConnectorError, ModuleError
from rollflow.stream.fragment_episodes import FragmentEpisodes
from rollflow.stream.live_episode import LaneEpisodes
from rollflow.stream.tree import Tree, map_tree, stack_trees


class AddStatesFromEpisodesToBatch(ConnectorV2):
    """Adds `state_in` for a stateful module, one state for each row and no time axis.

        as_learner_connector    whether the batch is for training

    While acting it is the episode's last `state_out`, or `rl_module.get_initial_state()` at the episode's start. For
    training it is the state before the first step of each row of `max_seq_len`: the initial one or, in a chunk that
    goes on with an episode, the lookback's last `state_out`; then what came out before each further row. Where the
    batch has `new_obs`, `next_state_in` is the state before the row's first one of those.

    Does nothing for a module that is not stateful, and where the batch has `state_in`. Raises ConnectorError for a
    chunk that goes on with an episode and has no lookback, and for one without `state_out`; ModuleError for a module
    that gives none, or one that is not like its initial state.
    """

    columnar = True
    changes_episodes = False

    def __init__(
        self,
        input_observation_space: gym.Space[Any] | None = None,
        input_action_space: gym.Space[Any] | None = None,
        *,
        as_learner_connector: bool = False,
    ) -> None:
        super().__init__(input_observation_space, input_action_space)
        self.as_learner_connector = as_learner_connector

    @module_by_module
    def __call__(
        self,
        *,
        rl_module: Any,
        batch: Batch,
        episodes: Episodes,
        explore: bool | None = None,
        shared_data: dict[str, Any] | None = None,
        metrics: Any = None,
        **kwargs: Any,
    ) -> Batch:
        if not is_stateful(rl_module) or Columns.STATE_IN in batch:
            return batch
        initial = map_tree(_array, rl_module.get_initial_state())
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
            before, after = _of_fragments(episodes, initial, length)
            batch[Columns.STATE_IN] = before
            if with_next:
                batch[Columns.NEXT_STATE_IN] = after
            return
        for episode in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False):
            if not len(episode):
                continue
            before, after = _of_episode(episode, initial, length)
            rows = -(-len(episode) // length)
            self.add_n_batch_items(batch, Columns.STATE_IN, before, rows, episode)
            if with_next:
                self.add_n_batch_items(batch, Columns.NEXT_STATE_IN, after, rows, episode)


def _of_lane(episodes: LaneEpisodes, initial: Tree, rl_module: Any) -> Tree:
    begun, previous = episodes.just_begun(), episodes.previous(Columns.STATE_OUT)
    if previous is None and not begun.all():
        raise _without_state_out(rl_module)
    if previous is not None:
        _check_like(previous, initial, 1, rl_module)
    if previous is None:
        return map_tree(lambda leaf: np.repeat(leaf[None], len(begun), axis=0), initial)
    if not begun.any():
        return map_tree(np.array, previous)

    def merged(state: NDArray[Any], first: NDArray[Any]) -> NDArray[Any]:
        state = state.copy()
        state[begun] = first
        return state

    return map_tree(merged, previous, initial)


def _latest(episode: SingleAgentEpisode, initial: Tree, rl_module: Any) -> Tree:
    if not episode.rewards.total():
        return initial
    if Columns.STATE_OUT not in episode.extra_model_outputs:
        raise _without_state_out(rl_module)
    state = map_tree(_array, episode.get_extra_model_outputs(Columns.STATE_OUT, -1))
    _check_like(state, initial, 0, rl_module)
    return state


def _check_like(states: Tree, initial: Tree, leading: int, rl_module: Any) -> None:
    """Raise ModuleError unless states are of the initial one's kind, but for so many leading axes."""
    given = map_tree(lambda leaf: (leaf.dtype, leaf.shape[leading:]), states)
    expected = map_tree(lambda leaf: (leaf.dtype, leaf.shape), initial)
    if given != expected:
        raise ModuleError(
            f"module '{type(rl_module).__name__}' gave '{Columns.STATE_OUT}' {_kind(states, leading)}, expected "
            f"{_kind(initial, 0)}, as its get_initial_state() has"
        )


def _kind(states: Tree, leading: int) -> Tree:
    return map_tree(lambda leaf: f"{leaf.dtype}{list(leaf.shape[leading:])}", states)


def _without_state_out(rl_module: Any) -> ModuleError:
    return ModuleError(
        f"module '{type(rl_module).__name__}' has an initial state, but its forward pass gave no "
        f"'{Columns.STATE_OUT}'; expected it among the outputs of every step"
    )


def _of_fragments(episodes: FragmentEpisodes, initial: Tree, length: int) -> tuple[Tree, Tree]:
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

    def before(states: NDArray[Any], preceding: NDArray[Any], first: NDArray[Any]) -> NDArray[Any]:
        state_in: NDArray[Any] = states[np.maximum(start - 1, 0)]
        state_in[first_row] = np.where(continued.reshape(-1, *[1] * first.ndim), preceding, first[None])
        return state_in

    states = episodes.gather(Columns.STATE_OUT)
    state_in = map_tree(before, states, episodes.preceding(Columns.STATE_OUT), initial)
    return state_in, map_tree(lambda leaf: leaf[start], states)


def _of_episode(episode: SingleAgentEpisode, initial: Tree, length: int) -> tuple[Tree, Tree]:
    states = episode.extra_model_outputs.get(Columns.STATE_OUT)
    if states is None:
        raise ConnectorError(
            f"episode '{episode.id_}' has no extra model output '{Columns.STATE_OUT}', which a stateful module needs; "
            f"it has: {', '.join(episode.extra_model_outputs) or 'none'}"
        )
    if episode.t_started > 0 and not states.lookback:
        raise _without_lookback(episode)
    first = states.get(-1, neg_index_as_lookback=True) if states.lookback else initial
    out = [states.get(t) for t in range(len(episode))]
    return stack_trees([first, *out[length - 1 : -1 : length]]), stack_trees(out[::length])


def _without_lookback(episode: SingleAgentEpisode) -> ConnectorError:
    return ConnectorError(
        f"episode '{episode.id_}': the chunk from step {episode.t_started} on has no lookback, so the state before it "
        "is not known; a stateful module needs a lookback of at least 1"
    )


def _array(leaf: Any) -> Any:
    return leaf.detach().cpu().numpy() if torch.is_tensor(leaf) else np.asarray(leaf)
