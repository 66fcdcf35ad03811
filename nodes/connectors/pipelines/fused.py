"""Fused functions: the default pieces one after the other, as one call.

With few slots, calls from piece to piece take longer than the pieces' own work. A fused function gives just what its
pieces would, or None where it can't: then the pieces are called.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import optree
import torch
from numpy.typing import NDArray

from rollflow.nodes.connectors.common.batch_individual_items import BatchIndividualItems
from rollflow.nodes.connectors.common.by_module import MEMORIZED
from rollflow.nodes.connectors.common.episode_columns import AddObservationsFromEpisodesToBatch
from rollflow.nodes.connectors.common.stateful_columns import (
    TIME_RANK_ADDED,
    AddStatesFromEpisodesToBatch,
    AddTimeDimToBatchAndZeroPad,
)
from rollflow.nodes.connectors.common.tensors import NumpyToTensor, TensorToNumpy, aligned
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2
from rollflow.nodes.connectors.module_to_env.get_actions import (
    RACES,
    GetActions,
    may_mask,
    refuse_unusable,
    rules_all_out,
    slots_with_nan,
)
from rollflow.nodes.connectors.module_to_env.individual_items import (
    ListifyDataForVectorEnv,
    RemoveSingleTsTimeRankFromBatch,
    UnBatchToIndividualItems,
)
from rollflow.nodes.connectors.module_to_env.normalize_and_clip_actions import NormalizeAndClipActions
from rollflow.nodes.connectors.stateful import is_stateful
from rollflow.nodes.modules.distribution import Categorical, DistributionType, JointRaces, Races
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.tree import Tree
from rollflow.stream.fragments.live_episode import LaneEpisodes

_MOST_SIZES = 64  # of batches

# (pieces, module, batch, episodes, explore, shared_data) -> batch; None: the pieces are to be called
Fused = Callable[[Sequence[Any], Any, Batch, LaneEpisodes, Any, dict[str, Any]], Batch | None]


def fused_tail(pieces: Sequence[ConnectorV2], first: int) -> tuple[int, Fused | None]:
    """Place of the first of the last pieces that can be called as one, and the function; (-1, None) where none can.

    first    place of the first piece that may be among them
    """
    for classes, fused in _FUSED.items():
        if tuple(type(piece) for piece in pieces[-len(classes) :]) == classes:
            place = len(pieces) - len(classes)
            return (place, fused) if place >= first else (-1, None)
    return -1, None


def _observations_as_tensor(
    pieces: Sequence[Any], module: Any, batch: Batch, episodes: LaneEpisodes, explore: Any, shared_data: dict[str, Any]
) -> Batch | None:
    return None if batch else observations_as_tensor(pieces, module, episodes.newest())


def observations_as_tensor(pieces: Sequence[Any], module: Any, observations: Tree) -> Batch | None:
    """The batch that a whole fused env-to-module pipeline makes of observations, any[N, ...]; None where it can't."""
    if pieces[0].as_learner_connector or pieces[-1].is_elsewhere:
        return None
    if len(pieces) > len(_INTO_MODULE) and is_stateful(module):
        return None
    if getattr(module, "framework", "torch") != "torch" or module is None:
        return None
    if type(observations) is np.ndarray:
        return {Columns.OBS: aligned(torch.from_numpy(observations))} if observations.flags.carray else None
    leaves, structure = optree.tree_flatten(observations, none_is_leaf=True)
    if not all(type(leaf) is np.ndarray and leaf.flags.carray for leaf in leaves):
        return None
    return {Columns.OBS: structure.unflatten([aligned(torch.from_numpy(leaf)) for leaf in leaves])}


def _sampled_actions(
    pieces: Sequence[Any], module: Any, batch: Batch, episodes: LaneEpisodes, explore: Any, shared_data: dict[str, Any]
) -> Batch | None:
    if MEMORIZED in shared_data or TIME_RANK_ADDED in shared_data:
        return None
    arrays, is_usable = _acted(pieces, module, batch, explore, shared_data.get(RACES))
    if not is_usable:
        made = pieces[0].distribution_type(module, explore=bool(explore))
        refuse_unusable(batch[Columns.ACTION_DIST_INPUTS], shared_data, episodes, made, module)
    return arrays


def sampled_jointly(
    pieces: Sequence[Any], module: Any, batch: Batch, sizes: Sequence[int], explore: Any, shared_data: Sequence[Any]
) -> Batch | None:
    """The batch that a whole fused module-to-env pipeline makes for several lanes, in the rows of one batch.

    sizes, shared_data    of each lane

    None where each lane is to be run by itself, as where a lane's logits are refused.
    """
    if any(MEMORIZED in shared or TIME_RANK_ADDED in shared for shared in shared_data):
        return None
    races = [shared.get(RACES) for shared in shared_data]
    joint = None if None in races else races[0] if len(races) == 1 else JointRaces(races, sizes)
    arrays, is_usable = _acted(pieces, module, batch, explore, joint)
    return arrays if is_usable else None


def _acted(
    pieces: Sequence[Any], module: Any, batch: Batch, explore: Any, races: Races | JointRaces | None
) -> tuple[Batch | None, bool]:
    """The batch with actions, and True where the logits that they were sampled from are usable."""
    get, clip = pieces[0], pieces[-2]
    if clip.changes_actions:
        return None, True
    if Columns.ACTIONS in batch:  # the module has chosen
        chosen = batch[Columns.ACTIONS]
        is_whole = type(chosen) is torch.Tensor and not chosen.is_floating_point()
        return _arrays_of(batch) if is_whole or not slots_with_nan(chosen) else None, True
    logits = batch.get(Columns.ACTION_DIST_INPUTS)
    if logits is None or (races is None and explore) or Columns.ACTION_LOGP in batch:
        return None, True
    if type(logits) is not torch.Tensor or logits.dtype is not torch.float32 or logits.ndim != 2:
        return None, True
    arrays = _arrays_of(batch)
    made = get.distribution_type(module, explore=bool(explore))
    distribution = made.from_logits(logits) if type(made) is DistributionType else None
    if arrays is None or type(distribution) is not Categorical:
        return None, True
    if explore and races is not None:
        actions, logp = distribution.sample_with_logp(races)
        is_usable = logp.dot(_ones(len(logp))) > -np.inf  # the sum, in half the time for a few
        is_usable = is_usable and not (may_mask(module) and rules_all_out(arrays[Columns.ACTION_DIST_INPUTS]))
    else:
        actions, logp = distribution.likeliest_with_logp()
        given = arrays[Columns.ACTION_DIST_INPUTS]
        is_usable = np.maximum.reduce(given, axis=None) < np.inf and not rules_all_out(given)
    arrays[Columns.ACTIONS], arrays[Columns.ACTION_LOGP] = actions, logp
    return arrays, bool(is_usable)


@lru_cache(_MOST_SIZES)
def _ones(count: int) -> NDArray[np.float32]:
    return np.ones(count, np.float32)


def _arrays_of(batch: Batch) -> Batch | None:
    try:
        return {name: value.numpy() for name, value in batch.items()}
    except (AttributeError, RuntimeError, TypeError):  # nested, elsewhere, to be differentiated, of another type
        return None


_INTO_MODULE = (AddObservationsFromEpisodesToBatch, BatchIndividualItems, NumpyToTensor)
_FROM_MODULE = (
    GetActions,
    TensorToNumpy,
    UnBatchToIndividualItems,
    NormalizeAndClipActions,
    ListifyDataForVectorEnv,
)
_FUSED: dict[tuple[type, ...], Fused] = {
    _INTO_MODULE: _observations_as_tensor,
    (_INTO_MODULE[0], AddTimeDimToBatchAndZeroPad, AddStatesFromEpisodesToBatch, *_INTO_MODULE[1:]): (
        _observations_as_tensor
    ),
    _FROM_MODULE: _sampled_actions,
    (*_FROM_MODULE[:3], RemoveSingleTsTimeRankFromBatch, *_FROM_MODULE[3:]): _sampled_actions,
}
