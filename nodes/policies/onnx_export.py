"""A whole policy, its connector pieces included, as one function of tensors, and that as an ONNX program."""

import contextlib
import copy
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import optree
import torch
from torch import Tensor

from rollflow.nodes.connectors.common.batches import BatchIndividualItems, NumpyToTensor, TensorToNumpy
from rollflow.nodes.connectors.common.episode_columns import (
    AddObservationsFromEpisodesToBatch,
    AddStatesFromEpisodesToBatch,
    AddTimeDimToBatchAndZeroPad,
    FrameStacking,
)
from rollflow.nodes.connectors.connector_v2 import ConnectorV2
from rollflow.nodes.connectors.env_to_module.observation_pieces import (
    FlattenObservations,
    MeanStdFilter,
    OneHotObservations,
    PrevActionsPrevRewards,
    parts_like,
)
from rollflow.nodes.connectors.module_to_env.action_pieces import (
    TENSORS,
    ClipActions,
    EpsilonGreedy,
    GaussianNoise,
    GetActions,
    ListifyDataForVectorEnv,
    ModuleToAgentUnmapping,
    NormalizeAndClipActions,
    OrnsteinUhlenbeckNoise,
    RemoveSingleTsTimeRankFromBatch,
    Temperature,
    UnBatchToIndividualItems,
)
from rollflow.nodes.connectors.pipelines.adapting import AdaptActions, AdaptObservations
from rollflow.nodes.connectors.pipelines.connector_pipeline_v2 import pieces_within
from rollflow.nodes.modules.distribution import DistributionType
from rollflow.nodes.modules.rl_module import is_stateful
from rollflow.nodes.policies.artifact import Arrays
from rollflow.nodes.policies.onnx_policy import MEMORY, METADATA, NEXT, OnnxPolicy, facts_text, sorted_names
from rollflow.nodes.policies.program import exported
from rollflow.nodes.policies.space_text import described
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import PolicyError, refused
from rollflow.stream.data.space import flat_size, flatten, item_of, map_items, row_of
from rollflow.stream.data.system import require_packages
from rollflow.stream.data.tree import Tree, leaves_of, map_tree, structure_of

_LOGGERS = ("torch.onnx", "onnxscript", "onnx_ir")  # which tell of each of their steps
_ROWS = 3  # of the batch that is exported; any other number goes


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
    kind = type(piece)
    if kind not in _BEFORE or getattr(piece, "multi_agent", False):
        raise _without_form(piece)
    add = _BEFORE[kind]
    if add is None:
        return
    if plan.is_stacked and add is not _frames:
        raise PolicyError(f"'{piece.name}' rewrites observations behind FrameStacking, expected it before")
    add(piece, plan)


def _rewritten(piece: Any, plan: Plan) -> None:
    """Add the form of a piece that makes other observations any[N, ...] of them, and remembers nothing."""

    def form(step: Step) -> None:
        step.observation = piece.rewritten(step.observation)

    plan.forms.append(form)


def _without_form(piece: ConnectorV2) -> PolicyError:
    known = ", ".join(sorted(cls.__name__ for cls in _BEFORE))
    return PolicyError(
        f"'{piece.name}' ({type(piece).__name__}) has no tensor form, which an ONNX program is made of; expected none "
        f"but {known}"
    )


def _filtered(piece: MeanStdFilter, plan: Plan) -> None:
    if piece.update_stats:
        raise PolicyError(f"'{piece.name}' learns while it acts, which an ONNX program can't; expected learns=False")
    mean, deviation = torch.from_numpy(np.array(piece.mean)), torch.from_numpy(np.array(piece.deviation))

    def filtered(kept: list[Tensor]) -> Iterator[Tensor]:
        rows = torch.cat([leaf.reshape(leaf.shape[0], -1).double() for leaf in kept], 1)
        return parts_like(kept, piece.scaled(rows, mean, deviation, torch).float())

    def form(step: Step) -> None:
        step.observation = piece.map_boxes(filtered, step.observation)

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
            step.later.append(
                (len(step.kept), lambda newest: torch.cat([chosen[:, width:], flatten(space, newest)], 1))
            )
            step.kept.append(chosen)
        if rewards:
            assert step.rewards is not None
            assert step.begins is not None
            late = torch.cat([next(step.remembered)[:, 1:], step.rewards[:, None]], 1)
            parts[piece.PREV_REWARDS_KEY] = earned = torch.where(step.begins, torch.zeros(()), late)
            step.kept.append(earned)
        step.observation = parts

    plan.forms.append(form)


# Piece -> what adds its form to a plan; None: it changes only where numbers lie.
_BEFORE: dict[type, Callable[[Any, Plan], None] | None] = {
    AdaptObservations: _rewritten,
    FlattenObservations: _rewritten,
    OneHotObservations: _rewritten,
    MeanStdFilter: _filtered,
    FrameStacking: _frames,
    PrevActionsPrevRewards: _previous,
    AddObservationsFromEpisodesToBatch: None,
    AddTimeDimToBatchAndZeroPad: None,
    AddStatesFromEpisodesToBatch: None,
    BatchIndividualItems: None,
    NumpyToTensor: None,
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
        bring = piece.bringer(piece.input_action_space, TENSORS)

        def brought(output: dict[str, Any], actions: Tree, for_env: Tree) -> tuple[Tree, Tree]:
            if for_env is None:
                for_env = actions if bring is None else bring(actions)
            return actions, for_env

        return brought
    if type(piece) is AdaptActions:

        def adapted(output: dict[str, Any], actions: Tree, for_env: Tree) -> tuple[Tree, Tree]:
            return actions, piece.map(actions if for_env is None else for_env)

        return adapted
    raise _without_form(piece)


class TensorPolicy(torch.nn.Module):
    """A policy that takes the likeliest actions, as a function of the tensors that `names` gives.

    names      of the inputs: observations, rewards, begins, memory
    results    of the outputs

    Raises PolicyError for a policy with a piece that has no tensor form.
    """

    def __init__(self, policy: Any) -> None:
        super().__init__()
        if policy.explore:
            raise PolicyError(
                "the policy samples its actions, and an ONNX program takes the likeliest; expected explore=False"
            )
        self.module = copy.deepcopy(policy.module).cpu()
        self._space, self._action_space = policy.observation_space, policy.action_space
        self._plan = Plan()
        for piece in pieces_within(policy.env_to_module):
            add_form(piece, self._plan)
        self._initial = self.module.get_initial_state() if is_stateful(self.module) else None
        states = [] if self._initial is None else [torch.as_tensor(leaf) for leaf in leaves_of(self._initial)]
        self._structure = structure_of(item_of(self._space))
        self.example = [
            *map(torch.from_numpy, leaves_of(row_of(self._space, _ROWS))),
            *([torch.zeros(_ROWS)] if self._plan.takes_rewards else []),
        ]
        memory = [*self._plan.memory, *states]
        if memory:
            self.example += [torch.arange(_ROWS) == 0, *(leaf.expand(_ROWS, *leaf.shape).clone() for leaf in memory)]
        self._has_memory = bool(memory)
        self.names = [*sorted_names(described(self._space), "obs"), *(["rewards"] if self._plan.takes_rewards else [])]
        kept = [f"{MEMORY}{place}" for place in range(len(memory))]
        self.names += ["begins", *kept] if memory else []
        self._after = [action_form(piece, policy) for piece in pieces_within(policy.module_to_env)]
        with torch.no_grad():
            gives_inputs = self._actions(*self._prepared(self.example))[1] is not None
        self.results = [
            *sorted_names(described(self._action_space), "actions"),
            *(["action_dist_inputs"] if gives_inputs else []),
        ]
        self.results += [f"{NEXT}{name}" for name in kept]

    def forward(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        """Actions, distribution inputs where there are any, and what is to be remembered."""
        step, output = self._prepared(leaves)
        (actions, for_env), inputs = self._actions(step, output)
        for place, after in step.later:
            step.kept[place] = after(actions)
        made = [*leaves_of(for_env), *([] if inputs is None else [inputs]), *step.kept]
        return (*made, *leaves_of(output.get(Columns.STATE_OUT, [])))

    def _prepared(self, leaves: Sequence[Tensor]) -> tuple[Step, dict[str, Any]]:
        """The step after the pieces before the module, and the module's output."""
        given = iter(leaves)
        observation = optree.tree_unflatten(self._structure, [next(given) for _ in range(self._structure.num_leaves)])
        rewards = next(given) if self._plan.takes_rewards else None
        step = Step(observation, rewards, next(given)[:, None] if self._has_memory else None, given)
        for form in self._plan.forms:
            form(step)
        seen = step.observation if step.stacked is None else step.stacked
        if self._initial is None:
            output = self.module.forward_inference({Columns.OBS: seen})
            return step, dict(output)
        state = map_tree(step.recall, self._initial)
        output = self.module.forward_inference(
            {Columns.OBS: map_tree(lambda leaf: leaf[:, None], seen), Columns.STATE_IN: state}
        )
        flat = {
            name: column if name == Columns.STATE_OUT else map_tree(lambda leaf: leaf.squeeze(1), column)
            for name, column in output.items()
        }
        return step, flat

    def _actions(self, step: Step, output: dict[str, Any]) -> tuple[tuple[Tree, Tree], Tensor | None]:
        """What the module chose and what the environment gets, and the distribution's inputs."""
        actions, for_env = output.get(Columns.ACTIONS), None
        for form in self._after:
            if form is not None:
                actions, for_env = form(output, actions, for_env)
        given = map_items(TENSORS[2], self._action_space, actions if for_env is None else for_env)
        return (actions, given), output.get(Columns.ACTION_DIST_INPUTS)


def onnx_bytes(policy: Any, examples: Arrays) -> bytes:
    """A policy's ONNX program, which does on the examples what the policy does, to 1e-5.

    examples    observations, and what each part of the policy makes of them

    Raises PolicyError for a policy with a part that has no tensor form, and where the extra `onnx` is not there.
    """
    made = TensorPolicy(policy)
    model = _onnx_model(made, facts_text(described(policy.observation_space), described(policy.action_space)))
    OnnxPolicy(model).check(examples)
    return model


def _onnx_model(made: TensorPolicy, facts: str) -> bytes:
    require_packages("an ONNX program", "onnx", "onnx", "onnxscript", error=PolicyError)
    import onnx

    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with (
            refused("the policy has no ONNX program"),
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            warnings.simplefilter("ignore")  # torch's, about itself
            program = torch.onnx.export(
                exported(made, made.example),
                input_names=made.names,
                output_names=made.results,
                dynamo=True,
                verbose=False,
            )
            assert program is not None
            model = program.model_proto
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
    _strip(model)
    onnx.helper.set_model_props(model, {METADATA: facts})
    data: bytes = model.SerializeToString(deterministic=True)
    return data


def _strip(model: Any) -> None:
    """Leave out what says where and by which code the program was made."""
    del model.metadata_props[:]
    del model.graph.metadata_props[:]
    model.doc_string = model.graph.doc_string = ""
    for each in [*model.graph.node, *model.graph.value_info, *model.graph.input, *model.graph.output]:
        each.doc_string = ""
        del each.metadata_props[:]
    for each in model.graph.initializer:
        each.doc_string = ""
        del each.metadata_props[:]
