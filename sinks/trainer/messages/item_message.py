"""Fragments, and train batches made at the rollout, as messages to a trainer."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray

from rollflow.nodes.argument_checks import is_whole
from rollflow.nodes.offloaded.fragment_checks import MOST, check_whole
from rollflow.nodes.offloaded.fragment_message import message_of
from rollflow.sinks.trainer.messages.by_module import batches_in, num_steps, oldest_version
from rollflow.stream import wire
from rollflow.stream.data.errors import ColumnError, WireError, shown
from rollflow.stream.data.tree import leaves_of, map_tree
from rollflow.stream.fragments.fragment import EpisodeIds, Fragment, FragmentLayout
from rollflow.stream.multi_agent.multi_agent_fragment import AnyFragment as AnyFragment

Batch = dict[str, Any]
_LAYOUT = ("num_slots", "num_rows", "lookback")
_MOST = {"num_slots": 1 << 20, "num_rows": 1 << 24, "lookback": 1 << 24}


def message_of_fragment(number: int, fragment: Fragment, spaces: Sequence[gym.Space[Any]]) -> wire.Fragment:
    """A fragment of a rollout, whose observations are in one of `spaces`; the columns are referred to."""
    layout = fragment.layout
    ids = layout.episode_id
    assert isinstance(ids, EpisodeIds)
    entries = {name: getattr(layout, name) for name in _LAYOUT}
    entries |= {"resets_next_step": layout.resets_next_step, "episodes": ids.prefix}
    return message_of(fragment.lane, number, fragment, {"layout": entries}, spaces)


def layout_told(entries: Any, action_space: gym.Space[Any], before: FragmentLayout | None = None) -> FragmentLayout:
    """The layout of fragments, as their messages tell of it. Raises WireError where it is none.

    before    that of the fragment before, which is given again where this is the same
    """
    if before is not None and _is_told(before, entries):
        return before
    if not isinstance(entries, dict) or not isinstance(entries.get("episodes"), str):
        raise WireError(f"layout is {shown(entries)}, expected a map", "fragment")
    for name in _LAYOUT:
        check_whole(f"layout.{name}", entries.get(name), 0, _MOST[name])
    return FragmentLayout(
        **{name: entries[name] for name in _LAYOUT},
        action_space=action_space,
        resets_next_step=bool(entries.get("resets_next_step")),
        episode_id=EpisodeIds(entries["episodes"]),
    )


def _is_told(layout: FragmentLayout, entries: Any) -> bool:
    if type(entries) is not dict or type(entries.get("episodes")) is not str:
        return False
    assert isinstance(layout.episode_id, EpisodeIds)
    return (
        all(type(entries.get(name)) is int and entries[name] == getattr(layout, name) for name in _LAYOUT)
        and entries["episodes"] == layout.episode_id.prefix
        and entries.get("resets_next_step") is layout.resets_next_step
    )


def message_of_batch(
    number: int,
    batch: Batch,
    *,
    modules: Collection[str] | None = None,
    episodes: Mapping[str, Any] | None = None,
) -> wire.Fragment:
    """A train batch: tensors and arrays `any[B, ...]`. Raises ColumnError for a column of anything else.

    modules     it is module id -> train batch; ids of those that the trainer publishes weights for. None: it is not
    episodes    that have finished, as `FinishedEpisodes.told` has them; None: none
    """
    columns = {name: map_tree(lambda leaf, name=name: _array(leaf, name), tree) for name, tree in batch.items()}
    rest: dict[str, Any] = {"batch": True}
    if modules is not None:
        rest["by_module"] = True
    counted = [each for name, each in columns.items() if name in modules] if modules is not None else [columns]
    rest["policy_version"] = oldest_version(counted)
    rest["steps"] = num_steps(batches_in(columns, is_by_module=modules is not None))
    if episodes is not None:
        rest["episodes"] = episodes
    return wire.Fragment(0, number, columns, rest)


def told_of_batch(message: wire.Fragment) -> tuple[int | None, int]:
    """Oldest policy version and steps of a train batch. Raises WireError where a message says no such thing."""
    oldest, steps = message.rest.get("policy_version"), message.rest.get("steps", 0)
    if oldest is not None and not is_whole(oldest):
        raise WireError(f"policy_version is {shown(oldest)}, expected a whole number, or nil", "fragment")
    check_whole("steps", steps, 0, MOST)
    return oldest, steps


def batch_of_message(message: wire.Fragment) -> Batch:
    """The train batch in a message, tensors over the memory that they came in. Raises WireError where it is none."""
    try:
        return tensors_of(message.columns)
    except (TypeError, ValueError) as error:
        raise WireError(f"it is no train batch: {error}", "fragment") from error


def tensors_of(columns: Mapping[str, Any]) -> Batch:
    """A train batch over the memory of trees of arrays."""
    return {
        name: torch.from_numpy(tree) if isinstance(tree, np.ndarray) else map_tree(torch.from_numpy, tree)
        for name, tree in columns.items()
    }


def arrays_of(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The trees of arrays under a train batch that has come."""
    return {name: map_tree(lambda tensor: tensor.numpy(), tree) for name, tree in batch.items()}


def nbytes_of(message: wire.Fragment) -> int:
    """Bytes of the columns."""
    return sum(leaf.nbytes for tree in message.columns.values() for leaf in leaves_of(tree))


def is_batch(message: wire.Fragment) -> bool:
    """True if a message has a train batch, and not a fragment."""
    return message.rest.get("batch") is True


def num_told(message: wire.Fragment) -> int:
    """Returns of episodes that a train batch of ours tells."""
    entries = message.rest.get("episodes")
    if entries is None:
        return 0
    return sum(len(part["returns"]) for part in (entries, *entries.get("by_module", {}).values()))


def _array(leaf: Any, name: str) -> NDArray[Any]:
    if torch.is_tensor(leaf):
        leaf = leaf.detach().cpu().numpy()
    if not isinstance(leaf, np.ndarray) or leaf.dtype.hasobject:
        raise ColumnError(f"column '{name}' of the batch is {type(leaf).__name__}, expected tensors or arrays")
    return leaf
