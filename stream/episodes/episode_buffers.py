"""Buffers of a single-agent episode: made, cut, joined, saved, and checked before an episode grows."""

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np

from rollflow.stream.data.errors import EpisodeError, located
from rollflow.stream.data.tree import concatenate_trees, equal_trees, map_tree
from rollflow.stream.episodes.buffer import LookbackBuffer, count_of

if TYPE_CHECKING:
    from rollflow.stream.episodes.single_agent import SingleAgentEpisode


def total_of(items: Any, name: str) -> int:
    """Number of items in a list, a buffer (with its lookback), or a tree of arrays `any[n, ...]`."""
    if isinstance(items, LookbackBuffer):
        return items.total()
    return len(items) if isinstance(items, list) else count_of(items, name)


def as_buffer(items: Any, lookback: int, space: gym.Space[Any] | None, name: str) -> LookbackBuffer:
    """A buffer of a copied list, or of a tree of arrays `any[n, ...]`; a buffer is returned itself, with a space."""
    if isinstance(items, LookbackBuffer):
        if items.space is None:
            items.space = space
        return items
    data = [] if items is None else list(items) if isinstance(items, list) else items
    return LookbackBuffer(data, lookback, space, name=name)


def part_of(buffer: LookbackBuffer, start: int, stop: int, lookback: int, *, shares_arrays: bool) -> LookbackBuffer:
    """A new buffer of the items at positions start … stop - 1, with the first `lookback` of them as history."""
    data = buffer.items(slice(start, stop))
    if buffer.is_numpy and not shares_arrays:
        data = map_tree(np.copy, data)
    return LookbackBuffer(data, lookback, buffer.space, name=buffer.name)


def joined(head: LookbackBuffer, tail: LookbackBuffer, first: int = 0) -> LookbackBuffer:
    """A new buffer: all of `head`, and the current items of `tail` from number `first` on."""
    before = head.items(slice(0, head.total()))
    after = head.in_form(tail.items(slice(tail.lookback + first, tail.total())))
    data = concatenate_trees([before, after]) if head.is_numpy else before + after
    return LookbackBuffer(data, head.lookback, head.space, name=head.name)


def outputs_joined(head: "SingleAgentEpisode", tail: "SingleAgentEpisode") -> dict[str, LookbackBuffer]:
    """The extra outputs of both episodes, joined; if one has no step, the keys are the other's.

    Raises EpisodeError where the keys differ, ColumnError where `head` has arrays that the data of `tail` do not fit.
    """
    if not tail.rewards.total():
        return head.extra_model_outputs
    if not head.rewards.total():
        outputs = {
            key: joined(LookbackBuffer([], name=key), buffer) for key, buffer in tail.extra_model_outputs.items()
        }
        if head.rewards.is_numpy:
            for buffer in outputs.values():
                buffer.to_numpy()
        return outputs
    if tail.extra_model_outputs.keys() != head.extra_model_outputs.keys():
        raise EpisodeError(
            f"episode '{head.id_}': the chunk to join has extra outputs {sorted(tail.extra_model_outputs)}, "
            f"expected {sorted(head.extra_model_outputs)}"
        )
    return {key: joined(mine, tail.extra_model_outputs[key]) for key, mine in head.extra_model_outputs.items()}


def state_of(buffer: LookbackBuffer) -> dict[str, Any]:
    """State of a buffer: copies of its items, lookback and space."""
    data = buffer.items(slice(0, buffer.total()))
    copied = map_tree(np.copy, data) if buffer.is_numpy else copy.deepcopy(data)
    return {"data": copied, "lookback": buffer.lookback, "space": buffer.space}


def buffer_from_state(name: str, state: Mapping[str, Any]) -> LookbackBuffer:
    """The buffer of a state that `state_of` returned."""
    return LookbackBuffer(copy.deepcopy(state["data"]), state["lookback"], state["space"], name=name)


def checked_step(
    episode: "SingleAgentEpisode",
    observation: Any,
    action: Any,
    reward: Any,
    extra_model_outputs: Mapping[str, Any] | None,
) -> tuple[dict[str, LookbackBuffer], list[tuple[LookbackBuffer, Any]]]:
    """Check a step; return the buffers of the extra outputs, and pairs (buffer, value to append).

    Raises EpisodeError and ColumnError as `SingleAgentEpisode.add_env_step` does.
    """
    if episode.is_done:
        raise EpisodeError(f"episode '{episode.id_}': add_env_step after its end at step {episode.t}")
    if not episode.is_reset:
        raise EpisodeError(f"episode '{episode.id_}': add_env_step before add_env_reset")
    extra, buffers = extra_model_outputs or {}, episode.extra_model_outputs
    if (buffers or episode.rewards.total()) and extra.keys() != buffers.keys():
        raise EpisodeError(
            f"episode '{episode.id_}': extra_model_outputs {sorted(extra)} at step {episode.t}, expected those of the "
            f"steps before, {sorted(buffers)}"
        )
    outputs = buffers or {key: LookbackBuffer([], name=key) for key in extra}
    values = [
        (episode.observations, observation),
        (episode.actions, action),
        (episode.rewards, reward),
        *((outputs[key], value) for key, value in extra.items()),
    ]
    if episode.observations.is_numpy:
        with located(f"episode '{episode.id_}'"):
            for buffer, value in values:
                buffer.in_form([value])
    return outputs, values


def check_joinable(head: "SingleAgentEpisode", tail: "SingleAgentEpisode") -> None:
    """Raise EpisodeError unless `tail` is the chunk of the same episode that begins where `head` ends."""
    if tail.id_ != head.id_:
        raise EpisodeError(f"episode '{head.id_}' can't be joined by a chunk of another, '{tail.id_}'")
    if head.is_done:
        raise EpisodeError(f"episode '{head.id_}': concat_episode after its end at step {head.t}")
    if tail.t_started != head.t:
        raise EpisodeError(
            f"episode '{head.id_}' ends at step {head.t}, but the chunk to join begins at step {tail.t_started}"
        )
    if not head.is_reset or not tail.is_reset:
        raise EpisodeError(f"episode '{head.id_}': concat_episode before add_env_reset, on one side or both")
    if not equal_trees(head.get_observations(-1), tail.get_observations(0)):
        raise EpisodeError(
            f"episode '{head.id_}': its last observation at step {head.t} is not the first of the chunk to join"
        )
    head.validate()
    tail.validate()
