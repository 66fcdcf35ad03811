"""The buffers that an episode is made of: out of what it is given, as parts, joined, and as a state."""

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np

from rollflow.stream.buffer import LookbackBuffer, count_of
from rollflow.stream.errors import EpisodeError
from rollflow.stream.tree import concatenate_trees, map_tree

if TYPE_CHECKING:
    from rollflow.stream.episode import SingleAgentEpisode


def total_of(items: Any, name: str) -> int:
    """How many items a list, a buffer, or a tree of arrays has, a buffer's lookback included."""
    if isinstance(items, LookbackBuffer):
        return items.total()
    return len(items) if isinstance(items, list) else count_of(items, name)


def as_buffer(items: Any, lookback: int, space: gym.Space[Any] | None, name: str) -> LookbackBuffer:
    """A buffer of a list, which is copied, or of a tree of arrays; a ready one itself, with a space if it had none."""
    if isinstance(items, LookbackBuffer):
        if items.space is None:
            items.space = space
        return items
    data = [] if items is None else list(items) if isinstance(items, list) else items
    return LookbackBuffer(data, lookback, space, name=name)


def part_of(buffer: LookbackBuffer, start: int, stop: int, lookback: int, *, shares_arrays: bool) -> LookbackBuffer:
    """A new buffer of the items at positions start … stop - 1, the first `lookback` of them as history."""
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
    """The extra outputs of both; an episode without a step takes the other's keys, whichever they are.

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
    """Items, lookback and space; the items are copies."""
    data = buffer.items(slice(0, buffer.total()))
    copied = map_tree(np.copy, data) if buffer.is_numpy else copy.deepcopy(data)
    return {"data": copied, "lookback": buffer.lookback, "space": buffer.space}


def buffer_from_state(name: str, state: Mapping[str, Any]) -> LookbackBuffer:
    """The buffer that `state_of` was asked of."""
    return LookbackBuffer(copy.deepcopy(state["data"]), state["lookback"], state["space"], name=name)
