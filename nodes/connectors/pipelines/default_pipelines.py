"""The pipelines of a rollout and a learner: into the module, from it to the environments, and into a train batch.

With few slots, calls from piece to piece take longer than the pieces' own work. So the default ones are called as one,
which gives just what each of them would in turn, or None if it can't: then the pieces are called.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import numpy as np
import torch

from rollflow.nodes.connectors.common.batches import (
    AgentToModuleMapping,
    BatchIndividualItems,
    FusedObservations,
    NumpyToTensor,
    TensorToNumpy,
)
from rollflow.nodes.connectors.common.episode_columns import (
    AddObservationsFromEpisodesToBatch,
    AddStatesFromEpisodesToBatch,
    AddTimeDimToBatchAndZeroPad,
)
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes, Space
from rollflow.nodes.connectors.learner.train_columns import AddColumnsFromEpisodesToTrainBatch, StepsConnector
from rollflow.nodes.connectors.list_form import single_agent_episodes
from rollflow.nodes.connectors.module_to_env.action_pieces import (
    PASSED_ON,
    FusedActions,
    GetActions,
    ListifyDataForVectorEnv,
    ModuleToAgentUnmapping,
    NormalizeAndClipActions,
    RemoveSingleTsTimeRankFromBatch,
    UnBatchToIndividualItems,
    arrange_exploration,
    same_items,
)
from rollflow.nodes.connectors.pipelines.connector_pipeline_v2 import (
    ConnectorPipelineV2,
    note_own_pieces,
    pieces_within,
)
from rollflow.nodes.modules.rl_module import evaluating
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ConnectorError
from rollflow.stream.data.tree import Tree, leaves_of
from rollflow.stream.episodes.multi_agent import MultiAgentEpisode
from rollflow.stream.episodes.single_agent import SingleAgentEpisode
from rollflow.stream.fragments.fragment import Fragment, FragmentEpisodes

_INTO_MODULE = (AddObservationsFromEpisodesToBatch, BatchIndividualItems, NumpyToTensor)
_INTO_STATEFUL = (_INTO_MODULE[0], AddTimeDimToBatchAndZeroPad, AddStatesFromEpisodesToBatch, *_INTO_MODULE[1:])
_FROM_MODULE = (GetActions, TensorToNumpy, UnBatchToIndividualItems, NormalizeAndClipActions, ListifyDataForVectorEnv)
_FROM_STATEFUL = (*_FROM_MODULE[:3], RemoveSingleTsTimeRankFromBatch, *_FROM_MODULE[3:])


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
        return self._fused_alone("batch_of", 1, rl_module, observations)


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
        return self._fused_alone("jointly", len(sizes), rl_module, batch, sizes, explore, shared_data)
