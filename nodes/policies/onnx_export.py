"""A whole policy, its connector pieces included, as one function of tensors, and that as an ONNX program."""

import contextlib
import copy
import inspect
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollflow.nodes.connectors.common.batches import CHOSEN_BY, DEVICE
from rollflow.nodes.connectors.common.episode_columns import (
    AddStatesFromEpisodesToBatch,
    AddTimeDimToBatchAndZeroPad,
    FrameStacking,
)
from rollflow.nodes.connectors.connector_v2 import ConnectorV2
from rollflow.nodes.connectors.module_to_env.action_pieces import TENSORS
from rollflow.nodes.connectors.pipelines.adapting import AdaptActions, AdaptObservations
from rollflow.nodes.connectors.pipelines.connector_pipeline_v2 import pieces_within
from rollflow.nodes.modules.distribution import DistributionType
from rollflow.nodes.modules.rl_module import is_stateful
from rollflow.nodes.policies.artifact import Arrays
from rollflow.nodes.policies.onnx_policy import MEMORY, METADATA, NEXT, OnnxPolicy, facts_text, sorted_names
from rollflow.nodes.policies.space_text import described
from rollflow.nodes.stages.acting import chosen_space
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import PolicyError, refused
from rollflow.stream.data.space import map_items, row_of
from rollflow.stream.data.system import require_packages
from rollflow.stream.data.tree import Tree, leaves_of, map_tree, structure_of
from rollflow.stream.fragments.live_episode import LaneEpisodes

_LOGGERS = ("torch.onnx", "onnxscript", "onnx_ir")  # which tell of each of their steps
_ROWS = 3  # of the batch that is exported; any other number goes
_THERE = "there"  # which of the last steps an episode has
# Pieces that take tensors while they act, though not on every device.
_ON_TENSORS = (AdaptObservations, AdaptActions, AddTimeDimToBatchAndZeroPad, AddStatesFromEpisodesToBatch)


class RecalledEpisodes(LaneEpisodes):
    """Episodes of N sessions as tensors: their newest observations, and what is remembered of the steps before.

    rewards, begins    f32[N] and bool[N], if something is remembered
    memory             column -> values of the last steps, a tree of tensors any[N, count, ...], oldest first
    action_space       in the first pass, which makes the memory that its pieces ask for, of zeros
    """

    def __init__(
        self, observations: Tree, rewards: Any, begins: Any, memory: dict[str, Tree], action_space: Any = None
    ) -> None:
        super().__init__(None, (), observations, is_settled=True)  # type: ignore[arg-type]  # they are of no lane
        self._begins, self._action_space = begins, action_space
        if Columns.REWARDS in memory:
            memory = {**memory, Columns.REWARDS: _later(memory[Columns.REWARDS], rewards)}
        self.memory = {name: map_tree(lambda leaf: self.recalled(leaf, 0), each) for name, each in memory.items()}

    def recalled(self, values: Tensor, initial: Any) -> Tensor:
        """What is remembered, any[N, ...]; if an episode begins, its initial value."""
        begins = self._begins.view(-1, *[1] * (values.ndim - 1))
        return torch.where(begins, torch.as_tensor(initial, dtype=values.dtype), values)

    def observations(self) -> Tree:
        return self.newest()

    def settle(self, space: Any) -> None:
        """Leave observations as they are: what pieces make of tensors is in the dtypes of their spaces."""

    def recent(self, name: str, count: int) -> Tree:
        there = leaves_of(self.memory.get(name, ()))
        if self._action_space is not None and (not there or there[0].shape[1] < count):
            one = self.newest() if name == Columns.OBS else torch.zeros(_ROWS)
            if name == Columns.ACTIONS:  # onnxruntime chooses among few types of whole numbers
                row = map_tree(torch.from_numpy, row_of(self._action_space, _ROWS))
                one = map_tree(lambda leaf: leaf if leaf.is_floating_point() else leaf.long(), row)
            self.memory[name] = map_tree(lambda leaf: leaf.new_zeros(_ROWS, count, *leaf.shape[1:]), one)
        return map_tree(lambda leaf: leaf[:, -count:], self.memory[name])

    def steps_there(self, count: int) -> Any:
        return self.recent(_THERE, count) > 0

    def memory_after(self, actions: Tree) -> dict[str, Tree]:
        """What is remembered after a step with the module's actions, any[N, ...]."""
        there = None if self._begins is None else torch.ones_like(self._begins)
        newest = {Columns.OBS: self.newest(), Columns.ACTIONS: actions, _THERE: there}
        memory = {
            name: map_tree(_later, self.memory[name], newest[name]) for name in self.memory.keys() & newest.keys()
        }
        return self.memory | memory


def _later(past: Tensor, newest: Tensor) -> Tensor:
    """Values any[N, count, ...] one step later."""
    return torch.cat([past[:, 1:], newest[:, None].to(past.dtype)], 1)


def has_form(piece: Any) -> bool:
    """True for a class of rollflow's own pieces that act on tensors alone."""
    return (piece.on_device or piece in _ON_TENSORS) and not piece.is_of_user and not inspect.isabstract(piece)


def check_forms(pieces: Sequence[Any]) -> None:
    """Raise PolicyError, with its name, for a piece that can't be part of an ONNX program where it stands."""
    for place, piece in enumerate(pieces):
        if not has_form(type(piece)) or getattr(piece, "multi_agent", False):
            known = sorted(
                each.__name__ for each in _kinds(ConnectorV2) if has_form(each) and not inspect.isabstract(each)
            )
            raise PolicyError(
                f"'{piece.name}' ({type(piece).__name__}) has no tensor form, which an ONNX program is made of; "
                f"expected none but {', '.join(known)}"
            )
        if getattr(piece, "update_stats", False):
            raise PolicyError(
                f"'{piece.name}' learns while it acts, which an ONNX program can't; expected learns=False"
            )
        if piece.changes_episodes and any(type(each) is FrameStacking for each in pieces[:place]):
            raise PolicyError(f"'{piece.name}' rewrites observations behind FrameStacking, expected it before")


def _kinds(kind: Any) -> Iterator[Any]:
    """The subclasses of a class, those of theirs included."""
    for each in kind.__subclasses__():
        yield from (each, *_kinds(each))


class TensorPolicy(torch.nn.Module):
    """A policy that takes the likeliest actions, as a function of the tensors that `names` gives.

    names      of the inputs: observations, rewards, begins, memory
    results    of the outputs

    Its pieces work as on a device. Raises PolicyError for a policy with one that can't.
    """

    def __init__(self, policy: Any) -> None:
        super().__init__()
        if policy.explore:
            raise PolicyError(
                "the policy samples its actions, and an ONNX program takes the likeliest; expected explore=False"
            )
        self.module = copy.deepcopy(policy.module).cpu()
        self._action_space, observation_space = policy.action_space, policy.observation_space
        self._before, self._after = (
            list(pieces_within(copy.deepcopy(each))) for each in (policy.env_to_module, policy.module_to_env)
        )
        for pieces in (self._before, self._after):
            check_forms(pieces)
        self._initial = self.module.get_initial_state() if is_stateful(self.module) else {}
        states = map_tree(lambda leaf: torch.as_tensor(leaf).expand(_ROWS, *np.shape(leaf)).clone(), self._initial)
        observations, begins = map_tree(torch.from_numpy, row_of(observation_space, _ROWS)), torch.arange(_ROWS) == 0
        chosen = chosen_space(self.module, self._action_space)
        first = RecalledEpisodes(observations, None, begins, {}, chosen)
        with torch.no_grad():
            output = self._acted(first, states)
        memory, count = first.memory, len(leaves_of([first.memory, states]))
        rewards = [torch.zeros(_ROWS)] if Columns.REWARDS in memory else []
        given = [observations, rewards, [begins] if count else [], memory, states]
        self._given, self.example = structure_of(given), leaves_of(given)
        kept = [f"{MEMORY}{place}" for place in range(count)]
        self.names = sorted_names(described(observation_space), "obs")
        self.names += [*(["rewards"] if rewards else []), *(["begins"] if count else []), *kept]
        self.results = sorted_names(described(self._action_space), "actions")
        self.results += [each for each in [Columns.ACTION_DIST_INPUTS] if each in output]
        self.results += [f"{NEXT}{name}" for name in kept]

    def forward(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        """Actions, distribution inputs if there are any, and what is to be remembered."""
        given: Any = self._given.unflatten(leaves)
        observations, rewards, begins, memory, states = given
        episodes = RecalledEpisodes(observations, next(iter(rewards), None), next(iter(begins), None), memory)
        output = self._acted(episodes, states)
        chosen, inputs = output[Columns.ACTIONS], output.get(Columns.ACTION_DIST_INPUTS, ())
        for_env = map_items(TENSORS[2], self._action_space, output.get(Columns.ACTIONS_FOR_ENV, chosen))
        return tuple(leaves_of([for_env, inputs, episodes.memory_after(chosen), output.get(Columns.STATE_OUT, ())]))

    def _acted(self, episodes: RecalledEpisodes, states: Tree) -> dict[str, Any]:
        """The module's output for the newest observations, as the pieces behind it leave that."""
        shared: dict[str, Any] = {DEVICE: torch.device("cpu")}
        given: dict[str, Any] = {"rl_module": self.module, "episodes": episodes, "explore": False}
        batch: dict[str, Any] = {}
        for piece in self._before:
            if type(piece) is AddStatesFromEpisodesToBatch:
                if self._initial:
                    batch[Columns.STATE_IN] = map_tree(episodes.recalled, states, self._initial)
            else:
                batch = piece(batch=batch, shared_data=shared, **given)
        batch = dict(self.module.forward_inference(batch))
        for piece in self._after:
            batch = piece(batch=batch, shared_data=shared, **given)
        if not isinstance(made := shared.get(CHOSEN_BY, None), DistributionType | None):
            raise PolicyError(f"the module's distribution is {made!r}, expected that of its action space")
        return batch


def onnx_bytes(policy: Any, examples: Arrays) -> bytes:
    """A policy's ONNX program, which does on the examples what the policy does, to 1e-5.

    examples    observations, and what each part of the policy makes of them

    Raises PolicyError for a policy with a part that has no tensor form, and if the extra `onnx` is not there.
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
            torch.no_grad(),
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            warnings.simplefilter("ignore")  # torch's, about itself
            batch = torch.export.Dim("batch")  # a first axis of any length, the same for all
            shapes = {"leaves": tuple({0: batch} for _ in made.example)}
            exported = torch.export.export(made, tuple(made.example), dynamic_shapes=shapes, strict=False)
            program = torch.onnx.export(
                exported.run_decompositions({}),
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
    graph = model.graph
    for each in [*graph.node, *graph.value_info, *graph.input, *graph.output, *graph.initializer]:
        each.doc_string = ""
        del each.metadata_props[:]
