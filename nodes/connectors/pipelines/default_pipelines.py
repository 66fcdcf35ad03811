"""The pipelines of a rollout and a learner: into the module, from it to the environments, and into a train batch.

With few slots, calls from piece to piece take longer than the pieces' own work. So the default ones are called as one,
which gives just what each of them would in turn, or None if it can't: then the pieces are called.
"""

import abc
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from time import perf_counter_ns
from typing import Any, ClassVar, Self
from weakref import WeakKeyDictionary

import numpy as np
import optree
import torch

from rollflow.nodes.connectors.common.batches import (
    ALIGNED_BYTES,
    CHOSEN_BY,
    DEVICE,
    MEMORIZED,
    AgentToModuleMapping,
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
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes, Space
from rollflow.nodes.connectors.learner.train_columns import AddColumnsFromEpisodesToTrainBatch, StepsConnector
from rollflow.nodes.connectors.list_form import single_agent_episodes
from rollflow.nodes.connectors.module_to_env.action_pieces import (
    PASSED_ON,
    RACES,
    GetActions,
    ListifyDataForVectorEnv,
    ModuleToAgentUnmapping,
    NormalizeAndClipActions,
    RemoveSingleTsTimeRankFromBatch,
    UnBatchToIndividualItems,
    are_usable,
    arrange_exploration,
    may_mask,
    refuse_infinite,
    refuse_unusable,
    rules_all_out,
    same_items,
    slots_with_nan,
)
from rollflow.nodes.connectors.pipelines.connector_pipeline_v2 import (
    ConnectorPipelineV2,
    note_own_pieces,
    pieces_within,
)
from rollflow.nodes.modules.distribution import Categorical, DiagGaussian, DistributionType, JointRaces, Races
from rollflow.nodes.modules.rl_module import RLModule, evaluating, is_stateful
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ConnectorError
from rollflow.stream.data.tree import Tree, leaves_of
from rollflow.stream.episodes.multi_agent import MultiAgentEpisode
from rollflow.stream.episodes.single_agent import SingleAgentEpisode
from rollflow.stream.fragments.fragment import Fragment, FragmentEpisodes
from rollflow.stream.fragments.lane import Lane
from rollflow.stream.fragments.live_episode import LaneEpisodes

_INTO_MODULE = (AddObservationsFromEpisodesToBatch, BatchIndividualItems, NumpyToTensor)
_INTO_STATEFUL = (_INTO_MODULE[0], AddTimeDimToBatchAndZeroPad, AddStatesFromEpisodesToBatch, *_INTO_MODULE[1:])
_FROM_MODULE = (GetActions, TensorToNumpy, UnBatchToIndividualItems, NormalizeAndClipActions, ListifyDataForVectorEnv)
_FROM_STATEFUL = (*_FROM_MODULE[:3], RemoveSingleTsTimeRankFromBatch, *_FROM_MODULE[3:])


_UNKNOWN: Any = object()
_ACTED = {Columns.ACTIONS, Columns.ACTION_LOGP, Columns.ACTIONS_FOR_ENV}
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
        """The batch that the pieces make of observations, any[N, ...]; None if they are to be called."""
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
        if type(observations) is torch.Tensor:  # of a lane on a device
            return {Columns.OBS: observations}
        if type(observations) is dict and all(map(_is_usable, observations.values())):
            return {Columns.OBS: {key: aligned(torch.from_numpy(leaf)) for key, leaf in observations.items()}}
        leaves, structure = optree.tree_flatten(observations, none_is_leaf=True)
        if all(type(leaf) is torch.Tensor for leaf in leaves):
            return {Columns.OBS: observations}
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
    """Tensors of all rows of an array any[rows, N, ...], or by key of a dict of them; () if they are made singly.

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
        if MEMORIZED in shared_data or TIME_RANK_ADDED in shared_data:
            return None
        if DEVICE in shared_data:
            return self._of_tensors(rl_module, batch, explore, shared_data)
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

        None if each lane is to be run by itself, as if a lane's logits are refused.
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
        """The batch with actions, and False if the inputs that they were sampled from may be unusable."""
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

    def _of_tensors(self, module: Any, batch: Batch, explore: Any, shared_data: dict[str, Any]) -> Batch | None:
        """The batch of a lane on a device with actions; None if the pieces are to be called."""
        logits = batch.get(Columns.ACTION_DIST_INPUTS)
        if not explore or type(logits) is not torch.Tensor or logits.dtype is not torch.float32:
            return None
        if not _ACTED.isdisjoint(batch):
            return None
        if self._asks or module is not self._module or explore is not self._explore:
            self._resolve(module, explore, logits)
        if self._type is None:
            return None
        shared_data[CHOSEN_BY] = self._type
        chance = shared_data[RACES if self._is_categorical else "generator"]
        actions, logp = self._type.from_logits(logits).sample_tensors(chance)
        made = {**batch, Columns.ACTIONS: actions, Columns.ACTION_LOGP: logp}
        return self._clip(batch=made, shared_data=shared_data) if self._clip.changes_actions else made

    def _sample(self, arrays: Batch, logits: torch.Tensor, chance: Any) -> bool:
        """Add actions and their log-probabilities; False if the logits that they follow from may be unusable.

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


class _BatchPipeline(ConnectorPipelineV2):
    """Base of pipelines that make a batch for the module's forward pass out of episodes."""

    _for_learner: ClassVar[bool]

    @classmethod
    def default(
        cls,
        observation_space: Space | None = None,
        action_space: Space | None = None,
        custom_pieces: Sequence[ConnectorV2] = (),
        *,
        stateful: bool = False,
        multi_agent: bool = False,
        device: Any = None,
    ) -> Self:
        """`custom_pieces`, then the default ones: observations (and, before a learner, all other columns), as tensors.

        stateful       True: with a time axis and `state_in`, for a stateful module
        multi_agent    True: by module ids
        device         of the tensors
        """
        learns = cls._for_learner
        pieces: list[ConnectorV2] = [*custom_pieces, AddObservationsFromEpisodesToBatch(as_learner_connector=learns)]
        if learns:
            pieces.append(AddColumnsFromEpisodesToTrainBatch())
        if stateful:
            pieces.append(AddTimeDimToBatchAndZeroPad(as_learner_connector=learns))
            pieces.append(AddStatesFromEpisodesToBatch(as_learner_connector=learns))
        if multi_agent:
            pieces.append(AgentToModuleMapping(as_learner_connector=learns))
        pieces.append(BatchIndividualItems(multi_agent=multi_agent))
        pieces.append(NumpyToTensor(device=device, pin_memory=not learns and str(device).startswith("cuda")))
        return cls(observation_space, action_space, connectors=pieces)

    def __call__(self, *, episodes: Episodes, batch: Batch | None = None, **kwargs: Any) -> Batch:
        batch = {} if batch is None else batch
        return super().__call__(batch=batch, episodes=episodes, **{"explore": False, **kwargs})


class EnvToModulePipeline(_BatchPipeline):
    """Makes the batch of a forward pass out of the ongoing episodes, one per slot."""

    kind = "env-to-module"
    fused_forms = dict.fromkeys((_INTO_MODULE, _INTO_STATEFUL), FusedObservations)
    _for_learner = False

    def run_on(self, rl_module: Any, observations: Tree) -> Batch | None:
        """`run` for observations, any[N, ...], that no episode holds.

        None if episodes are needed: with other pieces than the default ones, and if these are not fused.
        """
        if self._fused_from != 0 or not self.fuses or not isinstance(self._fused, FusedObservations):
            return None
        mark = perf_counter_ns()
        made = self._fused.batch_of(rl_module, observations)
        if made is not None:
            self._fused_timer.calls += 1
            self._fused_timer.total_ns += perf_counter_ns() - mark
        return made


class LearnerConnectorPipeline(_BatchPipeline):
    """Makes a train batch out of episodes or chunks of them; with `stateful`, in rows of `max_seq_len` steps."""

    kind = "learner"
    _for_learner = True

    def of_fragments(self, fragments: Sequence[Fragment], rl_module: Any, metrics: Any = None) -> Batch:
        """The train batch of some fragments; the pieces' input spaces become those of the fragments."""
        observation_space, action_space = fragments[0].observation_space, fragments[0].layout.action_space
        if observation_space is not self.input_observation_space or action_space is not self.input_action_space:
            self.set_input_spaces(observation_space, action_space)
        try:
            return self(rl_module=rl_module, episodes=FragmentEpisodes(fragments), metrics=metrics)
        except Exception as error:
            error.add_note("in the train batch of " + ", ".join(fragment.describe() for fragment in fragments))
            raise

    def __call__(self, *, episodes: Episodes, rl_module: Any = None, **kwargs: Any) -> Batch:
        """Make the train batch. The pieces see the module in evaluation mode: see `evaluating`."""
        if isinstance(episodes, FragmentEpisodes) and not len(episodes):
            episodes = []
        if self.lookback:
            self._check_shown(episodes)
        if any(
            isinstance(piece, ConnectorPipelineV2)
            or piece.is_of_user
            or (isinstance(piece, StepsConnector) and piece.uses_module)
            for piece in self._pieces
        ):
            rl_module = evaluating(rl_module)
        batch = super().__call__(episodes=episodes, rl_module=rl_module, **kwargs)
        try:
            _check_lengths(batch, episodes)
        except ConnectorError as error:
            note_own_pieces(error, self)
            raise
        return batch

    def check_lookback(self, fragment: Fragment) -> None:
        """Raise ConnectorError if episodes go on behind a fragment that keeps too few steps for a piece's lookback."""
        chunks, kept = fragment.chunks, fragment.layout.lookback
        if kept < self.lookback and not (chunks.terminated | chunks.truncated).all():
            raise self._too_short(f"fragments keep {kept} steps of the fragment before, expected {self.lookback}")

    def _check_shown(self, episodes: Episodes) -> None:
        """Raise ConnectorError for a chunk that shows fewer steps before its first than a piece looks back."""
        alone: Sequence[SingleAgentEpisode]
        if isinstance(episodes, FragmentEpisodes):
            alone, started, shown = episodes, episodes.chunk_index("t_started"), episodes.chunk_index("lookback")
        else:
            alone = list(single_agent_episodes(episodes, stepped_only=False))
            started = np.array([episode.t_started for episode in alone], np.int64)
            shown = np.array([episode.observations.lookback for episode in alone], np.int64)
        short = np.flatnonzero(shown < np.minimum(started, self.lookback))
        if len(short):
            chunk = int(short[0])
            raise self._too_short(
                f"the chunk that begins at step {started[chunk]} of episode '{alone[chunk].id_}' shows {shown[chunk]} "
                f"before it, expected {min(started[chunk], self.lookback)}"
            )

    def _too_short(self, problem: str) -> ConnectorError:
        name = max(self._pieces, key=lambda piece: piece.lookback).name
        return ConnectorError(
            f"{name} looks back {self.lookback} steps, but {problem}: give lookback={self.lookback} to the Rollout or "
            "the DatasetSource"
        ).see("lookback")


def _check_lengths(batch: Batch, episodes: Episodes) -> None:
    """Raise ConnectorError unless every column has as many rows as `obs`, or one for each chunk."""
    if isinstance(episodes, FragmentEpisodes) or not any(isinstance(each, MultiAgentEpisode) for each in episodes):
        return _check_columns(batch, len(episodes))
    num_chunks = Counter(each.module_id for each in single_agent_episodes(episodes, stepped_only=False))
    for module, columns in batch.items():
        if isinstance(columns, dict) and module in num_chunks:
            _check_columns(columns, num_chunks[module], f" of module '{module}'")
    return None


def _check_columns(batch: Batch, num_chunks: int, of: str = "") -> None:
    rows = {
        column: len(leaves[0])
        for column, data in batch.items()
        if column != Columns.INFOS and (leaves := leaves_of(data)) and isinstance(leaves[0], np.ndarray | torch.Tensor)
    }
    expected = rows.get(Columns.OBS)
    for column, count in rows.items():
        if expected is not None and count not in (expected, num_chunks):
            raise ConnectorError(
                f"column '{column}'{of} has {count} rows beside '{Columns.OBS}' with {expected} of {num_chunks} "
                f"chunks, expected {expected}, or one for each chunk: a piece that adds a column adds it for every "
                "chunk"
            )


class ModuleToEnvPipeline(ConnectorPipelineV2):
    """Makes actions for the environments out of a forward pass's output.

    The batch then has `actions`, the module's choice, and `actions_for_env`, which the environments get.
    """

    kind = "module-to-env"
    fused_forms = dict.fromkeys((_FROM_MODULE, _FROM_STATEFUL), FusedActions)

    @classmethod
    def default(
        cls,
        observation_space: Space | None = None,
        action_space: Space | None = None,
        custom_pieces: Sequence[ConnectorV2] = (),
        *,
        normalize_actions: bool = False,
        clip_actions: bool = True,
        stateful: bool = False,
        multi_agent: bool = False,
    ) -> Self:
        """Sampling, arrays, items one by one, `custom_pieces`, and the actions brought into their bounds.

        normalize_actions, clip_actions    as for `NormalizeAndClipActions`
        stateful                           True: the module's output has a time axis
        multi_agent                        True: the module's output is by module ids
        """
        return cls(
            observation_space,
            action_space,
            connectors=[
                GetActions(),
                TensorToNumpy(),
                UnBatchToIndividualItems(),
                *([ModuleToAgentUnmapping()] if multi_agent else []),
                *([RemoveSingleTsTimeRankFromBatch()] if stateful else []),
                *custom_pieces,
                NormalizeAndClipActions(normalize_actions=normalize_actions, clip_actions=clip_actions),
                ListifyDataForVectorEnv(),
            ],
        )

    def _arrange(self) -> None:
        super()._arrange()
        arrange_exploration(pieces_within(self))
        self.has_own_pieces = self._fused_from != 0  # beside the default ones

    def __call__(self, **kwargs: Any) -> Batch:
        """Call the pieces. The answer has `actions_for_env`: `actions`, if no piece made it."""
        batch = super().__call__(**kwargs)
        if Columns.ACTIONS in batch and Columns.ACTIONS_FOR_ENV not in batch:
            batch[Columns.ACTIONS_FOR_ENV] = same_items(batch[Columns.ACTIONS])
        return batch

    def to_record(self, batch: Batch, shared_data: dict[str, Any]) -> Batch:
        """The batch without its `actions_for_env`, if the environments get `actions` and no piece may change that.

        Every vector step of a rollout gives the same columns.
        """
        pieces = self._pieces
        if (
            shared_data.get(PASSED_ON)
            and len(pieces) > 1
            # The piece that brings actions into their bounds comes last but one, before no user's piece.
            and type(pieces[-1]) is ListifyDataForVectorEnv
            and isinstance(pieces[-2], NormalizeAndClipActions)
        ):
            del batch[Columns.ACTIONS_FOR_ENV]
        return batch

    def run_jointly(
        self, rl_module: Any, batch: Batch, sizes: Sequence[int], explore: bool, shared_data: Sequence[dict[str, Any]]
    ) -> Batch | None:
        """`run` for several lanes at once: their rows one after the other, in one batch.

        sizes, shared_data    of each lane

        None if each lane is to be run by itself: with other pieces than the default ones, and if these are not
        fused.
        """
        if self._fused_from != 0 or not self.fuses or not isinstance(self._fused, FusedActions):
            return None
        mark = perf_counter_ns()
        made = self._fused.jointly(rl_module, batch, sizes, explore, shared_data)
        if made is not None:
            self._fused_timer.calls += len(sizes)
            self._fused_timer.total_ns += perf_counter_ns() - mark
        return made
