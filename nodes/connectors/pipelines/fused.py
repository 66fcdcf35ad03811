"""Fused pieces: the default ones one after the other, as one call.

With few slots, calls from piece to piece take longer than the pieces' own work. Fused pieces give just what each of
them would in turn, or None where they can't: then the pieces are called.
"""

import abc
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import optree
import torch

from rollflow.nodes.connectors.common.batches import (
    ALIGNED_BYTES,
    DEVICE,
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
    are_usable,
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
from rollflow.stream.fragments.lane import Lane
from rollflow.stream.fragments.live_episode import LaneEpisodes

_UNKNOWN: Any = object()
_FEW_ROWS, _MOST_BYTES = 16, 1 << 20  # of columns whose rows become tensors at once


class FusedPieces(abc.ABC):
    """Pieces that are called as one. What the module alone decides, and not by a method of its own, is
    resolved once for it."""

    def __init__(self, pieces: Sequence[Any]) -> None:
        self._pieces = pieces
        self._module: Any = _UNKNOWN
        self._resolved: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # of modules that act in turns

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._pieces,)

    @abc.abstractmethod
    def make(
        self, rl_module: Any, batch: Batch, episodes: LaneEpisodes, explore: Any, shared_data: dict[str, Any]
    ) -> Batch | None:
        """The batch that the pieces make; None: they are to be called."""

    def _known(self, module: Any) -> Any:
        """What has been resolved for a module before; None: nothing."""
        try:
            return self._resolved.get(module)
        except TypeError:  # of a kind that is not referred to weakly
            return None

    def _keep(self, module: Any, resolved: Any) -> None:
        with suppress(TypeError):
            self._resolved[module] = resolved


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

    def make(
        self, rl_module: Any, batch: Batch, episodes: LaneEpisodes, explore: Any, shared_data: dict[str, Any]
    ) -> Batch | None:
        if batch:
            return None
        lane = episodes.lane
        if (
            rl_module is self._module
            and self._fits
            and episodes.is_settled
            and type(lane) is Lane
            and lane.episodes is episodes
        ):
            # The newest observations as they are recorded: tensors of all rows are made at once where they are small,
            # as views, which takes a third of the time.
            column, row = lane.fragment.columns[Columns.OBS], lane.row
            views = column.views
            if views is None:
                views = column.views = _views_of(column.tree)
            if type(views) is dict:
                return {Columns.OBS: {key: rows[row] for key, rows in views.items()}}
            if views:
                return {Columns.OBS: views[row]}
        return self.batch_of(rl_module, episodes.newest())

    def batch_of(self, rl_module: Any, observations: Tree) -> Batch | None:
        """The batch that the pieces make of observations, any[N, ...]; None where they are to be called."""
        if rl_module is not self._module:
            fits = self._known(rl_module)
            if fits is None:
                fits = self._fit(rl_module)
                self._keep(rl_module, fits)
            self._module, self._fits = rl_module, fits
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


def _views_of(tree: Tree) -> Any:
    """Tensors of all rows of an array any[rows, N, ...], or by key of a dict of them; () where they are made singly.

    They share one storage, all of which goes with a row that is pickled or copied deeply: hence small ones alone.
    """
    if type(tree) is dict:
        views = {key: _views_of(leaf) for key, leaf in tree.items()}
        return views if all(type(rows) is tuple and rows for rows in views.values()) else ()
    if not _is_usable(tree) or len(tree) < _FEW_ROWS or tree.nbytes > _MOST_BYTES or tree.strides[0] % ALIGNED_BYTES:
        return ()
    try:
        whole = torch.from_numpy(tree)
    except TypeError:  # there are no tensors of this dtype
        return ()
    return () if whole.data_ptr() % ALIGNED_BYTES else whole.unbind(0)


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
        self._one: Categorical | None = None  # of categorical ones that `like` makes as well
        self._asks = True  # at every step: a module may say otherwise by a method of its own
        self._may_mask = True

    def make(
        self, rl_module: Any, batch: Batch, episodes: LaneEpisodes, explore: Any, shared_data: dict[str, Any]
    ) -> Batch | None:
        if MEMORIZED in shared_data or TIME_RANK_ADDED in shared_data or DEVICE in shared_data:
            return None
        races, generator = shared_data.get(RACES), shared_data.get("generator")
        arrays, is_usable = self._acted(rl_module, batch, explore, races, generator)
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
        if any(MEMORIZED in shared or TIME_RANK_ADDED in shared or DEVICE in shared for shared in shared_data):
            return None
        races: list[Any] = [shared.get(RACES) for shared in shared_data]
        joint = None if None in races else races[0] if len(races) == 1 else JointRaces(races, sizes)
        arrays, is_usable = self._acted(rl_module, batch, explore, joint, None)
        return arrays if is_usable else None

    def _acted(
        self,
        module: Any,
        batch: Batch,
        explore: Any,
        races: Races | JointRaces | None,
        generator: torch.Generator | None,
    ) -> tuple[Batch | None, bool]:
        """The batch with actions, and False where the inputs that they were sampled from may be unusable."""
        arrays: Batch = {}
        try:
            for name, value in batch.items():
                arrays[name] = value.numpy()
        except (AttributeError, RuntimeError, TypeError):  # nested, elsewhere, to be differentiated, of another type
            return None, True
        is_usable, changes = True, self._clip.changes_actions
        if changes and Columns.ACTIONS_FOR_ENV in arrays:
            return None, True
        if Columns.ACTIONS in arrays:  # the module has chosen
            chosen = arrays[Columns.ACTIONS]
            if chosen.dtype.kind == "f" and slots_with_nan(chosen):
                return None, True
        else:
            logits = batch.get(Columns.ACTION_DIST_INPUTS)
            if type(logits) is not torch.Tensor or logits.dtype is not torch.float32 or logits.ndim != 2:
                return None, True
            if self._asks or module is not self._module or explore is not self._explore:
                self._resolve(module, explore, logits)
            chance = races if self._is_categorical else generator
            if self._type is None or Columns.ACTION_LOGP in arrays:
                return None, True
            if chance is None and (explore or not self._is_categorical):
                return None, True
            is_usable = self._sample(arrays, logits, chance)
        if changes:
            try:
                self._clip(batch=arrays)
            except ConnectorError:  # which the piece raises again, and is named
                return None, True
        return arrays, is_usable

    def _sample(self, arrays: Batch, logits: torch.Tensor, chance: Any) -> bool:
        """Add actions and their log-probabilities; False where the logits that they follow from may be unusable.

        chance    random numbers as the distribution takes them
        """
        given = arrays[Columns.ACTION_DIST_INPUTS]
        one = self._one if given.shape[1] == self._type.required_input_dim else None
        distribution: Any = self._type.from_logits(logits) if one is None else one.like(logits)
        if not self._explore:
            if self._is_categorical:
                actions, logp = distribution.likeliest_with_logp()
            else:
                actions, logp = distribution.to_deterministic().action.numpy(), np.zeros(len(given), np.float32)
            is_usable = bool(np.maximum.reduce(given, axis=None) < np.inf) and not rules_all_out(given)
        else:
            actions, logp = distribution.sample_with_logp(chance)
            if self._is_categorical:
                is_usable = are_usable(given, logp, self._may_mask)
            else:
                is_usable = bool(abs(np.add.reduce(logp)) < np.inf)
        arrays[Columns.ACTIONS], arrays[Columns.ACTION_LOGP] = actions, logp
        return is_usable

    def _resolve(self, module: Any, explore: Any, logits: torch.Tensor) -> None:
        known = None if module is self._module else self._known(module)
        if known is not None and known[0] is explore:
            self._module, self._asks = module, False
            self._explore, self._made, self._type, self._is_categorical, self._one, self._may_mask = known
            return
        made = self._get.distribution_type(module, explore=explore)
        if made is not self._made:
            one = made.from_logits(logits) if type(made) is DistributionType else None
            self._made, self._type = made, made if type(one) in (Categorical, DiagGaussian) else None
            self._is_categorical = type(one) is Categorical
            self._one = one if type(one) is Categorical and made.is_categorical else None
        name = "get_exploration_action_dist_cls" if explore else "get_inference_action_dist_cls"
        own = getattr(getattr(module, name, None), "__func__", None)
        self._asks = own is not getattr(RLModule, name)
        self._module, self._explore, self._may_mask = module, explore, may_mask(module)
        if not self._asks:
            known = explore, self._made, self._type, self._is_categorical, self._one, self._may_mask
            self._keep(module, known)


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
