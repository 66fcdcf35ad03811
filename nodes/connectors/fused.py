"""What the default pieces come down to when they are called one after the other, in one function.

With few slots a vector step spends longer on calls from piece to piece than on what the pieces do. A fused function
gives just what its pieces would, or None where they have something to do that it does not: then they are called.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from rollflow.nodes.connectors.common.add_observations_from_episodes_to_batch import AddObservationsFromEpisodesToBatch
from rollflow.nodes.connectors.common.add_states_from_episodes_to_batch import AddStatesFromEpisodesToBatch
from rollflow.nodes.connectors.common.add_time_dim_to_batch_and_zero_pad import (
    TIME_RANK_ADDED,
    AddTimeDimToBatchAndZeroPad,
)
from rollflow.nodes.connectors.common.agent_to_module_mapping import MEMORIZED
from rollflow.nodes.connectors.common.batch_individual_items import BatchIndividualItems
from rollflow.nodes.connectors.common.numpy_to_tensor import NumpyToTensor
from rollflow.nodes.connectors.common.tensor_to_numpy import TensorToNumpy
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2
from rollflow.nodes.connectors.module_to_env.get_actions import RACES, GetActions, refuse_unusable
from rollflow.nodes.connectors.module_to_env.listify_data_for_vector_env import ListifyDataForVectorEnv
from rollflow.nodes.connectors.module_to_env.normalize_and_clip_actions import NormalizeAndClipActions
from rollflow.nodes.connectors.module_to_env.remove_single_ts_time_rank_from_batch import (
    RemoveSingleTsTimeRankFromBatch,
)
from rollflow.nodes.connectors.module_to_env.unbatch_to_individual_items import UnBatchToIndividualItems
from rollflow.nodes.connectors.stateful import is_stateful
from rollflow.nodes.distribution import Categorical, DistributionType, JointRaces, Races
from rollflow.stream.columns import Columns
from rollflow.stream.live_episode import LaneEpisodes

# (the pieces, module, batch, episodes, explore, shared_data) -> batch, or None where the pieces are to be called
Fused = Callable[[Sequence[Any], Any, Batch, LaneEpisodes, Any, dict[str, Any]], Batch | None]


def fused_tail(pieces: Sequence[ConnectorV2]) -> tuple[int, Fused] | None:
    """Where the pieces begin that can be called as one, to the last, and the function; None where they can't."""
    for classes, fused in _FUSED.items():
        if tuple(type(piece) for piece in pieces[-len(classes) :]) == classes:
            return len(pieces) - len(classes), fused
    return None


def _observations_as_tensor(
    pieces: Sequence[Any], module: Any, batch: Batch, episodes: LaneEpisodes, explore: Any, shared_data: dict[str, Any]
) -> Batch | None:
    add, _, to_tensor = pieces
    if batch or add.as_learner_connector or to_tensor.is_elsewhere:
        return None
    observations = episodes.observations()
    if type(observations) is not np.ndarray or not observations.flags.carray:
        return None
    if getattr(module, "framework", "torch") != "torch" or module is None:
        return None
    batch[Columns.OBS] = torch.from_numpy(observations)
    return batch


def _observations_of_stateless(
    pieces: Sequence[Any], module: Any, batch: Batch, episodes: LaneEpisodes, explore: Any, shared_data: dict[str, Any]
) -> Batch | None:
    add, _, _, individual, to_tensor = pieces
    if is_stateful(module):
        return None
    return _observations_as_tensor((add, individual, to_tensor), module, batch, episodes, explore, shared_data)


def _sampled_without_time(
    pieces: Sequence[Any], module: Any, batch: Batch, episodes: LaneEpisodes, explore: Any, shared_data: dict[str, Any]
) -> Batch | None:
    if shared_data.get(TIME_RANK_ADDED):
        return None
    return _sampled_actions(pieces, module, batch, episodes, explore, shared_data)


def _sampled_actions(
    pieces: Sequence[Any], module: Any, batch: Batch, episodes: LaneEpisodes, explore: Any, shared_data: dict[str, Any]
) -> Batch | None:
    if MEMORIZED in shared_data:
        return None
    arrays, is_usable = _acted(pieces, module, batch, explore, shared_data.get(RACES))
    if not is_usable:
        refuse_unusable(batch[Columns.ACTION_DIST_INPUTS], shared_data, episodes)
    return arrays


def sampled_jointly(
    pieces: Sequence[Any], module: Any, batch: Batch, sizes: Sequence[int], explore: Any, shared_data: Sequence[Any]
) -> Batch | None:
    """What a whole fused module-to-env pipeline gives for several lanes, in the rows of one batch.

    sizes, shared_data    of each lane

    None where it is to be called for one lane after the other; that is so as well where a lane's logits are refused.
    """
    if any(MEMORIZED in shared or shared.get(TIME_RANK_ADDED) for shared in shared_data):
        return None
    races = [shared.get(RACES) for shared in shared_data]
    arrays, is_usable = _acted(pieces, module, batch, explore, None if None in races else JointRaces(races, sizes))
    return arrays if is_usable else None


def _acted(
    pieces: Sequence[Any], module: Any, batch: Batch, explore: Any, races: Races | JointRaces | None
) -> tuple[Batch | None, bool]:
    """The batch with actions, and whether nothing is wrong with the logits that they were sampled from."""
    get, clip = pieces[0], pieces[-2]
    if clip.changes_actions:
        return None, True
    if Columns.ACTIONS in batch:  # the module has chosen
        return _arrays_of(batch), True
    logits = batch.get(Columns.ACTION_DIST_INPUTS)
    if logits is None or races is None or not explore or Columns.ACTION_LOGP in batch:
        return None, True
    if type(logits) is not torch.Tensor or logits.dtype is not torch.float32 or logits.ndim != 2:
        return None, True
    arrays = _arrays_of(batch)
    made = get.distribution_type(module, explore=True)
    distribution = made.from_logits(logits) if type(made) is DistributionType else None
    if arrays is None or type(distribution) is not Categorical:
        return None, True
    actions, logp = distribution.sample_with_logp(races)
    arrays[Columns.ACTIONS], arrays[Columns.ACTION_LOGP] = actions, logp
    return arrays, bool(np.add.reduce(logp) > -np.inf)


def _arrays_of(batch: Batch) -> Batch | None:
    try:
        return {name: value.numpy() for name, value in batch.items()}
    except (AttributeError, RuntimeError, TypeError):  # nested, elsewhere, to be differentiated, of another type
        return None


_FUSED: dict[tuple[type, ...], Fused] = {
    (AddObservationsFromEpisodesToBatch, BatchIndividualItems, NumpyToTensor): _observations_as_tensor,
    (
        AddObservationsFromEpisodesToBatch,
        AddTimeDimToBatchAndZeroPad,
        AddStatesFromEpisodesToBatch,
        BatchIndividualItems,
        NumpyToTensor,
    ): _observations_of_stateless,
    (
        GetActions,
        TensorToNumpy,
        UnBatchToIndividualItems,
        RemoveSingleTsTimeRankFromBatch,
        NormalizeAndClipActions,
        ListifyDataForVectorEnv,
    ): _sampled_without_time,
    (
        GetActions,
        TensorToNumpy,
        UnBatchToIndividualItems,
        NormalizeAndClipActions,
        ListifyDataForVectorEnv,
    ): _sampled_actions,
}
