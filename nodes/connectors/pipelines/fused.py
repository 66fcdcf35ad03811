"""Fused pieces: the default ones one after the other, as one call.

With few slots, calls from piece to piece take longer than the pieces' own work. Fused pieces give just what each of
them would in turn, or None where they can't: then the pieces are called.
"""

import abc
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import optree
import torch
from numpy.typing import NDArray

from rollflow.nodes.connectors.common.batches import (
    MEMORIZED,
    BatchIndividualItems,
    NumpyToTensor,
    TensorToNumpy,
    aligned,
)
from rollflow.nodes.connectors.common.episode_columns import (
    TIME_RANK_ADDED,
    AddObservationsFromEpisodesToBatch,
    AddStatesFromEpisodesToBatch,
    AddTimeDimToBatchAndZeroPad,
)
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2
from rollflow.nodes.connectors.module_to_env.action_pieces import (
    RACES,
    GetActions,
    ListifyDataForVectorEnv,
    NormalizeAndClipActions,
    RemoveSingleTsTimeRankFromBatch,
    UnBatchToIndividualItems,
    may_mask,
    refuse_infinite,
    refuse_unusable,
    rules_all_out,
    slots_with_nan,
)
from rollflow.nodes.modules.distribution import Categorical, DiagGaussian, DistributionType, JointRaces, Races
from rollflow.nodes.modules.rl_module import RLModule, is_stateful
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ConnectorError
from rollflow.stream.data.tree import Tree
from rollflow.stream.fragments.live_episode import LaneEpisodes

_MOST_SIZES = 64  # of batches
_UNKNOWN: Any = object()


class FusedPieces(abc.ABC):
    """Pieces that are called as one. What the module alone decides, and not by a method of its own, is
    resolved once for it."""

    def __init__(self, pieces: Sequence[Any]) -> None:
        self._pieces = pieces
        self._module: Any = _UNKNOWN

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._pieces,)

    @abc.abstractmethod
    def __call__(
        self, rl_module: Any, batch: Batch, episodes: LaneEpisodes, explore: Any, shared_data: dict[str, Any]
    ) -> Batch | None:
        """The batch that the pieces make; None: they are to be called."""


def fused_tail(pieces: Sequence[ConnectorV2], first: int) -> tuple[int, FusedPieces | None]:
    """Place of the first of the last pieces that can be called as one, and these as one; (-1, None) where none can.

    first    place of the first piece that may be among them
    """
    for classes, fused in _FUSED.items():
        tail = pieces[-len(classes) :]
        if tuple(type(piece) for piece in tail) == classes:
            place = len(pieces) - len(classes)
            return (place, fused(tail)) if place >= first else (-1, None)
    return -1, None


class FusedObservations(FusedPieces):
    """The pieces that make a batch of the newest observations."""

    _fits = False  # the module

    def __call__(
        self, rl_module: Any, batch: Batch, episodes: LaneEpisodes, explore: Any, shared_data: dict[str, Any]
    ) -> Batch | None:
        return None if batch else self.batch_of(rl_module, episodes.newest())

    def batch_of(self, rl_module: Any, observations: Tree) -> Batch | None:
        """The batch that the pieces make of observations, any[N, ...]; None where they are to be called."""
        if rl_module is not self._module:
            self._module, self._fits = rl_module, self._fit(rl_module)
        if not self._fits:
            return None
        if type(observations) is np.ndarray:
            return {Columns.OBS: aligned(torch.from_numpy(observations))} if observations.flags.carray else None
        if type(observations) is dict and all(map(_is_usable, observations.values())):
            return {Columns.OBS: {key: aligned(torch.from_numpy(leaf)) for key, leaf in observations.items()}}
        leaves, structure = optree.tree_flatten(observations, none_is_leaf=True)
        if not all(map(_is_usable, leaves)):
            return None
        return {Columns.OBS: structure.unflatten([aligned(torch.from_numpy(leaf)) for leaf in leaves])}

    def _fit(self, module: Any) -> bool:
        if self._pieces[0].as_learner_connector or self._pieces[-1].is_elsewhere:
            return False
        if len(self._pieces) > len(_INTO_MODULE) and is_stateful(module):
            return False
        return module is not None and getattr(module, "framework", "torch") == "torch"


def _is_usable(leaf: Any) -> bool:
    """True for an array of which a tensor can be made without a copy."""
    return type(leaf) is np.ndarray and leaf.flags.carray


class FusedActions(FusedPieces):
    """The pieces that sample actions from a module's output, and bring them into the environments' bounds."""

    def __init__(self, pieces: Sequence[Any]) -> None:
        super().__init__(pieces)
        self._get, self._clip = pieces[0], pieces[-2]
        self._explore = False
        self._made: Any = None  # maker of distributions that the module gave last
        self._type: Any = None  # the same, if these are categorical ones, or normal ones over floats; else None
        self._is_categorical = False
        self._asks = True  # at every step: a module may say otherwise by a method of its own

    def __call__(
        self, rl_module: Any, batch: Batch, episodes: LaneEpisodes, explore: Any, shared_data: dict[str, Any]
    ) -> Batch | None:
        if MEMORIZED in shared_data or TIME_RANK_ADDED in shared_data:
            return None
        races, generator = shared_data.get(RACES), shared_data.get("generator")
        arrays, is_usable = self._acted(rl_module, batch, bool(explore), races, generator)
        if not is_usable:
            refuse_unusable(batch[Columns.ACTION_DIST_INPUTS], shared_data, episodes, self._type, rl_module)
        if not is_usable and arrays is not None:
            refuse_infinite(arrays[Columns.ACTION_LOGP], shared_data, episodes, rl_module)
        return arrays

    def jointly(
        self, rl_module: Any, batch: Batch, sizes: Sequence[int], explore: Any, shared_data: Sequence[dict[str, Any]]
    ) -> Batch | None:
        """The batch that the pieces make for several lanes, in the rows of one batch.

        sizes, shared_data    of each lane

        None where each lane is to be run by itself, as where a lane's logits are refused.
        """
        if any(MEMORIZED in shared or TIME_RANK_ADDED in shared for shared in shared_data):
            return None
        races: list[Any] = [shared.get(RACES) for shared in shared_data]
        joint = None if None in races else races[0] if len(races) == 1 else JointRaces(races, sizes)
        arrays, is_usable = self._acted(rl_module, batch, bool(explore), joint, None)
        return arrays if is_usable else None

    def _acted(
        self,
        module: Any,
        batch: Batch,
        explore: bool,
        races: Races | JointRaces | None,
        generator: torch.Generator | None,
    ) -> tuple[Batch | None, bool]:
        """The batch with actions, and False where the inputs that they were sampled from may be unusable."""
        changes = self._clip.changes_actions
        if changes and Columns.ACTIONS_FOR_ENV in batch:
            return None, True
        if Columns.ACTIONS in batch:  # the module has chosen
            chosen = batch[Columns.ACTIONS]
            is_whole = type(chosen) is torch.Tensor and not chosen.is_floating_point()
            arrays, is_usable = _arrays_of(batch) if is_whole or not slots_with_nan(chosen) else None, True
        else:
            arrays, is_usable = self._sampled(module, batch, explore, races, generator)
        if changes and arrays is not None:
            try:
                self._clip(batch=arrays)
            except ConnectorError:  # which the piece raises again, and is named
                return None, True
        return arrays, is_usable

    def _sampled(
        self,
        module: Any,
        batch: Batch,
        explore: bool,
        races: Races | JointRaces | None,
        generator: torch.Generator | None,
    ) -> tuple[Batch | None, bool]:
        """The batch with actions, sampled from its inputs; the rest as for `_acted`."""
        logits = batch.get(Columns.ACTION_DIST_INPUTS)
        if logits is None or (races is None and explore) or Columns.ACTION_LOGP in batch:
            return None, True
        if type(logits) is not torch.Tensor or logits.dtype is not torch.float32 or logits.ndim != 2:
            return None, True
        if self._asks or module is not self._module or explore is not self._explore:
            self._resolve(module, explore, logits)
        if self._type is None or not (self._is_categorical or generator is not None):
            return None, True
        arrays = _arrays_of(batch)
        if arrays is None:
            return None, True
        distribution, given = self._type.from_logits(logits), arrays[Columns.ACTION_DIST_INPUTS]
        if not explore:
            if self._is_categorical:
                actions, logp = distribution.likeliest_with_logp()
            else:
                actions, logp = distribution.to_deterministic().action.numpy(), np.zeros(len(given), np.float32)
            is_usable = np.maximum.reduce(given, axis=None) < np.inf and not rules_all_out(given)
        elif self._is_categorical:
            actions, logp = distribution.sample_with_logp(races)
            is_usable = logp.dot(_ones(len(logp))) > -np.inf  # the sum, in half the time for a few
            is_usable = is_usable and not (may_mask(module) and rules_all_out(given))
        else:
            actions, logp = distribution.sample_with_logp(generator)
            is_usable = abs(logp.dot(_ones(len(logp)))) < np.inf
        arrays[Columns.ACTIONS], arrays[Columns.ACTION_LOGP] = actions, logp
        return arrays, bool(is_usable)

    def _resolve(self, module: Any, explore: bool, logits: torch.Tensor) -> None:
        made = self._get.distribution_type(module, explore=explore)
        if made is not self._made:
            kind = type(made.from_logits(logits)) if type(made) is DistributionType else None
            self._made, self._type = made, made if kind in (Categorical, DiagGaussian) else None
            self._is_categorical = kind is Categorical
        name = "get_exploration_action_dist_cls" if explore else "get_inference_action_dist_cls"
        own = getattr(getattr(module, name, None), "__func__", None)
        self._asks = own is not getattr(RLModule, name)
        self._module, self._explore = module, explore


@lru_cache(_MOST_SIZES)
def _ones(count: int) -> NDArray[np.float32]:
    return np.ones(count, np.float32)


def _arrays_of(batch: Batch) -> Batch | None:
    arrays: Batch = {}
    try:
        for name, value in batch.items():
            arrays[name] = value.numpy()
    except (AttributeError, RuntimeError, TypeError):  # nested, elsewhere, to be differentiated, of another type
        return None
    return arrays


_INTO_MODULE = (AddObservationsFromEpisodesToBatch, BatchIndividualItems, NumpyToTensor)
_FROM_MODULE = (
    GetActions,
    TensorToNumpy,
    UnBatchToIndividualItems,
    NormalizeAndClipActions,
    ListifyDataForVectorEnv,
)
_FUSED: dict[tuple[type, ...], Callable[[Sequence[Any]], FusedPieces]] = {
    _INTO_MODULE: FusedObservations,
    (_INTO_MODULE[0], AddTimeDimToBatchAndZeroPad, AddStatesFromEpisodesToBatch, *_INTO_MODULE[1:]): FusedObservations,
    _FROM_MODULE: FusedActions,
    (*_FROM_MODULE[:3], RemoveSingleTsTimeRankFromBatch, *_FROM_MODULE[3:]): FusedActions,
}
