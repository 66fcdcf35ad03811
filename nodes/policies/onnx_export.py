"""A whole policy, its connector pieces included, as one function of tensors, and that as an ONNX program."""

import contextlib
import copy
import io
import logging
import warnings
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import optree
import torch
from gymnasium import spaces
from torch import Tensor

from rollflow.nodes.connectors.pipelines.default_pipelines import pieces_within
from rollflow.nodes.connectors.stateful import is_stateful
from rollflow.nodes.policies.examples import Arrays
from rollflow.nodes.policies.onnx_policy import MEMORY, METADATA, NEXT, OnnxPolicy, facts_text, named_spaces
from rollflow.nodes.policies.program import exported
from rollflow.nodes.policies.space_text import described
from rollflow.nodes.policies.tensor_forms import Plan, Step, action_form, add_form, in_types
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import PolicyError
from rollflow.stream.data.tree import Tree, leaves_of, map_tree

_LOGGERS = ("torch.onnx", "onnxscript", "onnx_ir")  # which tell of each of their steps
_ROWS = 3  # of the batch that is exported; any other number goes


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
        pieces = list(pieces_within(policy.env_to_module))
        self._plan = Plan()
        for piece in pieces:
            add_form(piece, self._plan)
        self._initial = self.module.get_initial_state() if is_stateful(self.module) else None
        states = [] if self._initial is None else [torch.as_tensor(leaf) for leaf in leaves_of(self._initial)]
        self._states = states
        self.example = [*zeros_of(self._space), *([torch.zeros(_ROWS)] if self._plan.takes_rewards else [])]
        memory = [*self._plan.memory, *states]
        if memory:
            self.example += [torch.arange(_ROWS) == 0, *(leaf.expand(_ROWS, *leaf.shape).clone() for leaf in memory)]
        self._has_memory = bool(memory)
        self.names = [*_names(self._space, "obs"), *(["rewards"] if self._plan.takes_rewards else [])]
        kept = [f"{MEMORY}{place}" for place in range(len(memory))]
        self.names += ["begins", *kept] if memory else []
        self._after = [action_form(piece, policy) for piece in pieces_within(policy.module_to_env)]
        with torch.no_grad():
            gives_inputs = self._actions(*self._prepared(self.example))[1] is not None
        self.results = [*_names(self._action_space, "actions"), *(["action_dist_inputs"] if gives_inputs else [])]
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
        observation = optree.tree_unflatten(_structure(self._space), [next(given) for _ in _names(self._space, "obs")])
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
        given = in_types(self._action_space, actions if for_env is None else for_env)
        return (actions, given), output.get(Columns.ACTION_DIST_INPUTS)


def onnx_bytes(policy: Any, examples: Arrays, before: bytes = b"") -> bytes:
    """A policy's ONNX program, which does on the examples what the policy does, to 1e-5.

        examples    observations, and what each part of the policy makes of them
        before      a program to be kept where it does so; b"": there is none

    Raises PolicyError for a policy with a part that has no tensor form, and where the extra `onnx` is not there.
    """
    if before and not policy.explore:
        with contextlib.suppress(PolicyError):
            OnnxPolicy(before).check(examples)
            return before
    made = TensorPolicy(policy)
    model = _onnx_model(made, facts_text(described(policy.observation_space), described(policy.action_space)))
    OnnxPolicy(model).check(examples)
    return model


def _onnx_model(made: TensorPolicy, facts: str) -> bytes:
    try:
        import onnx
        import onnxscript  # noqa: F401 - the exporter needs it
    except ImportError as error:
        raise PolicyError(f"{error.name} is not there, expected the extra: pip install 'rollflow[onnx]'") from None
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
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
    except PolicyError:
        raise
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise PolicyError(f"the policy has no ONNX program: {type(error).__name__}: {reason}") from error
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


def zeros_of(space: gym.Space[Any]) -> list[Tensor]:
    """Tensors any[_ROWS, ...] of a space, leaf by leaf."""
    kinds = dict(named_spaces(described(space), "obs"))
    return [torch.from_numpy(np.zeros((_ROWS, *kinds[name][1]), kinds[name][0])) for name in _names(space, "obs")]


def _names(space: gym.Space[Any], name: str) -> list[str]:
    """Names of the leaves, in the order in which trees have them."""
    if isinstance(space, spaces.Dict):
        return [each for key in sorted(space.keys()) for each in _names(space[key], f"{name}.{key}")]
    if isinstance(space, spaces.Tuple):
        return [each for place, part in enumerate(space) for each in _names(part, f"{name}.{place}")]
    return [name]


def _structure(space: gym.Space[Any]) -> Any:
    def like(part: gym.Space[Any]) -> Any:
        if isinstance(part, spaces.Dict):
            return {key: like(each) for key, each in part.items()}
        return tuple(like(each) for each in part) if isinstance(part, spaces.Tuple) else 0

    return optree.tree_structure(like(space), none_is_leaf=True)
