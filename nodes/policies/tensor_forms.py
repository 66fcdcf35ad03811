"""Connector pieces as functions of tensors: what an ONNX program does before and behind the module."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import gymnasium as gym
import numpy as np
import optree
import torch
from gymnasium import spaces
from torch import Tensor

from rollflow.nodes.connectors.adapting.field_map import FieldMap, LeafRule, assembled
from rollflow.nodes.connectors.adapting.pieces import AdaptActions, AdaptObservations
from rollflow.nodes.connectors.common.batch_individual_items import BatchIndividualItems
from rollflow.nodes.connectors.common.episode_columns import AddObservationsFromEpisodesToBatch
from rollflow.nodes.connectors.common.frame_stacking import FrameStacking
from rollflow.nodes.connectors.common.stateful_columns import AddStatesFromEpisodesToBatch, AddTimeDimToBatchAndZeroPad
from rollflow.nodes.connectors.common.tensors import NumpyToTensor, TensorToNumpy
from rollflow.nodes.connectors.connector_v2 import ConnectorV2
from rollflow.nodes.connectors.env_to_module.mean_std_filter import MeanStdFilter
from rollflow.nodes.connectors.env_to_module.observation_pieces import (
    FlattenObservations,
    OneHotObservations,
    PrevActionsPrevRewards,
)
from rollflow.nodes.connectors.module_to_env.exploration import (
    EpsilonGreedy,
    GaussianNoise,
    OrnsteinUhlenbeckNoise,
    Temperature,
)
from rollflow.nodes.connectors.module_to_env.get_actions import GetActions
from rollflow.nodes.connectors.module_to_env.individual_items import (
    ListifyDataForVectorEnv,
    ModuleToAgentUnmapping,
    RemoveSingleTsTimeRankFromBatch,
    UnBatchToIndividualItems,
)
from rollflow.nodes.connectors.module_to_env.normalize_and_clip_actions import ClipActions, NormalizeAndClipActions
from rollflow.nodes.modules.distribution import DistributionType, nearest_whole, whole_bounds_of
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import PolicyError
from rollflow.stream.data.space import flat_size, item_of
from rollflow.stream.data.tree import Tree, leaves_of, map_tree


@dataclass(slots=True)
class Step:
    """A vector step on its way through the pieces.

    observation    any[N, ...], as the pieces before have rewritten it
    stacked        what goes to the module in its place; None: nothing does
    begins         bool[N, 1]
    remembered     what the pieces remember, in their order; `kept` is the same after the step
    later          what is to be remembered of the action, once it is there
    """

    observation: Tree
    rewards: Tensor | None
    begins: Tensor | None
    remembered: Iterator[Tensor]
    kept: list[Tensor] = field(default_factory=list)
    stacked: Tree = None
    later: list[tuple[int, Callable[[Tree], Tensor]]] = field(default_factory=list)

    def recall(self, initial: Any = 0) -> Tensor:
        """The next thing that is remembered; where an episode begins, its initial value."""
        memory = next(self.remembered)
        assert self.begins is not None
        begins = self.begins.view(-1, *[1] * (memory.ndim - 1))
        return torch.where(begins, torch.as_tensor(initial, dtype=memory.dtype), memory)


Form = Callable[[Step], None]


@dataclass(slots=True)
class Plan:
    """Pieces as functions of tensors, and what they remember: arrays any[...] like it."""

    forms: list[Form] = field(default_factory=list)
    memory: list[Tensor] = field(default_factory=list)
    takes_rewards: bool = False
    is_stacked: bool = False


# Pieces before the module


def add_form(piece: ConnectorV2, plan: Plan) -> None:
    """Add a piece's form to a plan. Raises PolicyError, with the piece's name, where it has none."""
    make = _FORMS.get(type(piece))
    if make is None or getattr(piece, "multi_agent", False):
        raise _without_form(piece)
    if plan.is_stacked and type(piece) in _REWRITERS:
        raise PolicyError(f"'{piece.name}' rewrites observations behind FrameStacking, expected it before")
    make(piece, plan)


def _without_form(piece: ConnectorV2) -> PolicyError:
    known = ", ".join(sorted(cls.__name__ for cls in _FORMS))
    return PolicyError(
        f"'{piece.name}' ({type(piece).__name__}) has no tensor form, which an ONNX program is made of; expected none "
        f"but {known}"
    )


def _flattened(piece: Any, plan: Plan) -> None:
    space = piece._kept(piece.input_observation_space)

    def form(step: Step) -> None:
        step.observation = flat(space, step.observation)

    plan.forms.append(form)


def _one_hot(piece: Any, plan: Plan) -> None:
    space = piece.input_observation_space

    def form(step: Step) -> None:
        step.observation = _hot_items(space, step.observation)

    plan.forms.append(form)


def _filtered(piece: MeanStdFilter, plan: Plan) -> None:
    if piece.update_stats:
        raise PolicyError(f"'{piece.name}' learns while it acts, which an ONNX program can't; expected learns=False")
    mean = torch.from_numpy(np.array(piece.mean)) if piece.de_mean_to_zero else None
    spread = np.where(piece.deviation > 0.0, np.maximum(piece.deviation, 1e-8), 1.0)
    deviation = torch.from_numpy(spread) if piece.de_std_to_one else None
    clip, is_box = piece.clip_by_value, leaves_of(piece._filtered)

    def form(step: Step) -> None:
        leaves, structure = optree.tree_flatten(step.observation, none_is_leaf=True)
        begin = 0
        for place, filtered in enumerate(is_box):
            if not filtered:
                continue
            leaf = leaves[place]
            rows = leaf.reshape(leaf.shape[0], -1).double()
            end = begin + rows.shape[1]
            rows = rows if mean is None else rows - mean[begin:end]
            rows = rows if deviation is None else rows / deviation[begin:end]
            rows = rows if clip is None else rows.clamp(-clip, clip)
            leaves[place], begin = rows.float().reshape(leaf.shape), end
        step.observation = optree.tree_unflatten(structure, leaves)

    plan.forms.append(form)


def _frames(piece: FrameStacking, plan: Plan) -> None:
    if plan.is_stacked:  # the batch has observations already
        return
    plan.is_stacked, count = True, piece.num_frames
    items = [np.asarray(leaf) for leaf in leaves_of(item_of(cast("Any", piece.input_observation_space)))]
    plan.memory += [torch.from_numpy(np.zeros((count - 1, *leaf.shape), leaf.dtype)) for leaf in items if count > 1]

    def stacked(step: Step, leaf: Tensor) -> Tensor:
        frames = leaf[:, None]
        if count > 1:
            frames = torch.cat([step.recall(), frames], 1)
            step.kept.append(frames[:, 1:])
        beside = frames.movedim(1, -2)
        return beside.flatten(-2)

    def form(step: Step) -> None:
        step.stacked = map_tree(lambda leaf: stacked(step, leaf), step.observation)

    plan.forms.append(form)


def _previous(piece: PrevActionsPrevRewards, plan: Plan) -> None:
    actions, rewards, space = piece.n_prev_actions, piece.n_prev_rewards, cast("Any", piece.input_action_space)
    width = flat_size(space) if space is not None else 0
    plan.memory += [torch.zeros(actions * width)] if actions else []
    plan.memory += [torch.zeros(rewards)] if rewards else []
    plan.takes_rewards |= rewards > 0

    def form(step: Step) -> None:
        parts: dict[str, Any] = {piece.ORIG_OBS_KEY: step.observation}
        if actions:
            chosen = parts[piece.PREV_ACTIONS_KEY] = step.recall()
            step.later.append((len(step.kept), lambda newest: torch.cat([chosen[:, width:], flat(space, newest)], 1)))
            step.kept.append(chosen)
        if rewards:
            assert step.rewards is not None
            assert step.begins is not None
            late = torch.cat([next(step.remembered)[:, 1:], step.rewards[:, None]], 1)
            parts[piece.PREV_REWARDS_KEY] = earned = torch.where(step.begins, torch.zeros(()), late)
            step.kept.append(earned)
        step.observation = parts

    plan.forms.append(form)


def _adapted(piece: AdaptObservations, plan: Plan) -> None:
    fields = piece.map

    def form(step: Step) -> None:
        step.observation = _mapped(fields, step.observation)

    plan.forms.append(form)


def _mapped(fields: FieldMap, items: Tree) -> Tree:
    """`FieldMap` of tensors."""
    return assembled(fields.target, iter([_made_leaf(rule, items) for rule in fields.rules]))


def _made_leaf(rule: LeafRule, items: Tree) -> Tensor:
    """`LeafRule.made` of tensors."""
    count = leaves_of(items)[0].shape[0]
    if not rule.sources:
        rows = torch.from_numpy(rule.constants).expand(count, rule.target.size)
    else:
        parts = [leaf.found(items).reshape(count, leaf.size) for leaf in rule.sources]
        rows = parts[0] if len(parts) == 1 else torch.cat([part.double() for part in parts], -1)
    if rule.index is not None and rule.sources:
        rows = rows[:, torch.from_numpy(rule.index)]
    if rule.scale is not None:
        factor, offset = map(torch.from_numpy, rule.scale)
        rows = rows.double() * factor + offset
    if rule.filled is not None and rule.sources:
        rows = torch.where(torch.from_numpy(rule.filled), torch.from_numpy(rule.constants), rows.double())
    if rule.bounds is not None:
        low, high = map(torch.from_numpy, rule.bounds)
        rows = torch.minimum(torch.maximum(rows.double(), low), high)
    if rule.rounds and rows.is_floating_point():
        space = rule.target.space
        rows = nearest_whole(rows, whole_bounds_of(space)) if isinstance(space, spaces.Box) else rows.round()
    like = torch.from_numpy(np.zeros(0, rule.target.space.dtype))
    return rows.to(like.dtype).reshape(count, *rule.target.shape)


def _nothing(piece: ConnectorV2, plan: Plan) -> None:
    """The form of pieces that change only where numbers lie."""


_REWRITERS = {AdaptObservations, FlattenObservations, OneHotObservations, MeanStdFilter, PrevActionsPrevRewards}
_FORMS: dict[type, Callable[[Any, Plan], None]] = {
    AdaptObservations: _adapted,
    FlattenObservations: _flattened,
    OneHotObservations: _one_hot,
    MeanStdFilter: _filtered,
    FrameStacking: _frames,
    PrevActionsPrevRewards: _previous,
    AddObservationsFromEpisodesToBatch: _nothing,
    AddTimeDimToBatchAndZeroPad: _nothing,
    AddStatesFromEpisodesToBatch: _nothing,
    BatchIndividualItems: _nothing,
    NumpyToTensor: _nothing,
}

# Pieces behind the module

ActionForm = Callable[[dict[str, Any], Tree, Tree], tuple[Tree, Tree]]
_UNCHANGED = {RemoveSingleTsTimeRankFromBatch, TensorToNumpy, UnBatchToIndividualItems, ListifyDataForVectorEnv} | {
    ModuleToAgentUnmapping,
    # These change nothing where nothing is explored.
    EpsilonGreedy,
    GaussianNoise,
    OrnsteinUhlenbeckNoise,
    Temperature,
}


def action_form(piece: Any, policy: Any) -> ActionForm | None:
    if type(piece) in _UNCHANGED:
        return None
    if type(piece) is GetActions:
        made = piece.distribution_type(policy.module, explore=False)

        def likeliest(output: dict[str, Any], actions: Tree, for_env: Tree) -> tuple[Tree, Tree]:
            if actions is not None:
                return actions, for_env
            if not isinstance(made, DistributionType):
                raise PolicyError(f"the module's distribution is {made!r}, expected that of its action space")
            chosen: Any = made.from_logits(output[Columns.ACTION_DIST_INPUTS]).to_deterministic()
            return chosen.sample(), for_env

        return likeliest
    if type(piece) in (NormalizeAndClipActions, ClipActions):

        def brought(output: dict[str, Any], actions: Tree, for_env: Tree) -> tuple[Tree, Tree]:
            return actions, _brought(piece, piece.input_action_space, actions) if for_env is None else for_env

        return brought
    if type(piece) is AdaptActions:

        def adapted(output: dict[str, Any], actions: Tree, for_env: Tree) -> tuple[Tree, Tree]:
            return actions, _mapped(piece.map, actions if for_env is None else for_env)

        return adapted
    raise _without_form(piece)


def _brought(piece: Any, space: gym.Space[Any], actions: Tree) -> Tree:
    if isinstance(space, spaces.Dict):
        return {key: _brought(piece, part, actions[key]) for key, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_brought(piece, part, action) for part, action in zip(space, actions, strict=True))
    if not isinstance(space, spaces.Box):
        return actions
    if space.dtype.kind != "f":
        return _brought_whole(piece, space, actions)
    bounded = np.isfinite(np.stack([space.low, space.high]))
    low, high = torch.from_numpy(space.low), torch.from_numpy(space.high)
    if piece.normalize_actions and bounded.all():
        scaled = low + (actions + 1.0) * (high - low) / 2.0
        return torch.minimum(torch.maximum(scaled, low), high).to(low.dtype)
    if piece.clip_actions and bounded.any():
        return torch.minimum(torch.maximum(actions, low), high)
    return actions


def in_types(space: gym.Space[Any], actions: Tree) -> Tree:
    """Actions of a space in the dtypes of its leaves: `items_in` of tensors."""
    if isinstance(space, spaces.Dict):
        return {key: in_types(part, actions[key]) for key, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(in_types(part, action) for part, action in zip(space, actions, strict=True))
    like = torch.from_numpy(np.zeros(0, space.dtype))
    if isinstance(space, spaces.Box) and actions.is_floating_point() and not like.is_floating_point():
        actions = nearest_whole(actions.flatten(1), whole_bounds_of(space)).reshape(actions.shape)
    return actions.to(like.dtype)


def _brought_whole(piece: Any, box: spaces.Box, actions: Tensor) -> Tensor:
    """`_brought` for a Box of whole numbers."""
    if not actions.is_floating_point():
        return actions  # of this space: others are refused before they are normalized
    if piece.normalize_actions:
        below, above = (bound.reshape(box.shape) for bound in whole_bounds_of(box)[2:])
        actions = below + (actions.double() + 1.0) * (above / 2.0 - below / 2.0)
    return in_types(box, actions) if piece.normalize_actions or piece.clip_actions else actions


# Spaces


def flat(space: gym.Space[Any], items: Tree) -> Tensor:
    """`stream.data.space.flatten` of tensors."""
    if isinstance(space, spaces.Dict):
        return torch.cat([flat(space[key], items[key]) for key in sorted(space.keys())], -1)
    if isinstance(space, spaces.Tuple):
        return torch.cat([flat(part, item) for part, item in zip(space, items, strict=True)], -1)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        made: Tensor = _hot_items(space, items)
        return made
    rows: Tensor = items.reshape(items.shape[0], -1).float()
    return rows


def _hot_items(space: gym.Space[Any], items: Tree) -> Tree:
    """`stream.data.space.one_hot_items` of tensors."""
    if isinstance(space, spaces.Dict):
        return {key: _hot_items(part, items[key]) for key, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_hot_items(part, item) for part, item in zip(space, items, strict=True))
    if isinstance(space, spaces.Discrete):
        return _vectors(items - int(space.start), int(space.n))
    if isinstance(space, spaces.MultiDiscrete):
        flat = (items - torch.as_tensor(space.start)).reshape(items.shape[0], -1)
        sizes = space.nvec.reshape(-1).tolist()
        return torch.cat([_vectors(flat[:, place], size) for place, size in enumerate(sizes)], -1)
    return items


def _vectors(numbers: Tensor, count: int) -> Tensor:
    return (numbers[:, None] == torch.arange(count, dtype=numbers.dtype)).float()
