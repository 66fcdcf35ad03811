"""Modules that are no network: functions, objects with the two methods that acting takes, and actions at random."""

import inspect
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray

from rollflow.nodes.modules.distribution import ACTION_MASK, joined_mask
from rollflow.nodes.modules.rl_module import Batch, RLModule
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ModuleError, shown
from rollflow.stream.data.tree import leaves_of, map_tree

_OF_TORCH = ("state_dict", "load_state_dict", "eval")  # what acts has these
_METHODS = (
    *_OF_TORCH,
    "to",
    "forward_train",
    "compute_values",
    "get_initial_state",
    "get_exploration_action_dist_cls",
    "get_inference_action_dist_cls",
    "get_train_action_dist_cls",
)


class GivenModule(RLModule):
    """Acts by what is given as `model_config["given"]`, which is `given` then.

        a function    of observations, a tensor any[N, ...] or a tree of them; gives actions any[N, ...], or a dict of
                      outputs with `actions` or `action_dist_inputs`
        an object     with `forward_exploration(batch)` and `forward_inference(batch)`, which give dicts of outputs; if
                      it has others of a module's methods, such as `state_dict`, they are used as well

    Arrays and lists in outputs become tensors. Without a `state_dict` there are no weights.
    """

    def setup(self) -> None:
        """Take over the methods of what is given."""
        self.given: Any = self.model_config["given"]
        self._is_function = is_function(self.given)
        for name in _METHODS:
            method = getattr(self.given, name, None)
            if callable(method):
                setattr(self, name, method)

    def _forward(self, batch: Batch, **kwargs: Any) -> Batch:
        if not self._is_function:
            return super()._forward(batch, **kwargs)
        outputs = self.given(batch[Columns.OBS])
        is_named = isinstance(outputs, dict) and not {Columns.ACTIONS, Columns.ACTION_DIST_INPUTS}.isdisjoint(outputs)
        return self._tensors(outputs, outputs if is_named else {Columns.ACTIONS: outputs})

    def _forward_exploration(self, batch: Batch, **kwargs: Any) -> Batch:
        return self._forward_by("forward_exploration", batch, **kwargs)

    def _forward_inference(self, batch: Batch, **kwargs: Any) -> Batch:
        return self._forward_by("forward_inference", batch, **kwargs)

    def _forward_by(self, name: str, batch: Batch, **kwargs: Any) -> Batch:
        method = getattr(self.given, name, None)
        if method is None:
            return self._forward(batch, **kwargs)
        outputs = method(batch, **kwargs)
        return self._tensors(outputs, outputs)

    def _tensors(self, gave: Any, outputs: Any) -> Batch:
        """The module's outputs as tensors. Raises ModuleError, with what the policy gave, if they are none."""
        try:
            return {
                name: torch.as_tensor(column) if isinstance(column, list) else map_tree(torch.as_tensor, column)
                for name, column in outputs.items()
            }
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            name = getattr(self.given, "__qualname__", type(self.given).__name__)
            raise ModuleError(
                f"{name} gave {shown(gave)}, which is no tensor or array, nor a dict of those ({error}), expected "
                "actions any[N, ...], or a dict of outputs with 'actions' or 'action_dist_inputs'"
            ).see("module") from error


def is_function(module: Any) -> bool:
    """True for a policy that is a function of observations: one argument. What makes modules takes two."""
    if not callable(module) or isinstance(module, type | torch.nn.Module) or hasattr(module, "forward_exploration"):
        return False
    try:
        signature = inspect.signature(module)
        signature.bind(None)
    except (TypeError, ValueError):  # it takes another number, or does not say what it takes
        return False
    try:
        signature.bind(None, None)
    except TypeError:
        return True
    return False


def is_given(module: Any) -> bool:
    """True for what acts as a `GivenModule`: a function, or an object that has not all that a torch module has."""
    has_both = all(callable(getattr(module, f"forward_{name}", None)) for name in ("exploration", "inference"))
    return is_function(module) or (has_both and not all(callable(getattr(module, name, None)) for name in _OF_TORCH))


class RandomModule(RLModule):
    """Chooses every action with the same probability: a first opponent, and a baseline to compare with.

        Discrete, MultiDiscrete    `action_dist_inputs` f32[B, D], all 0; with `explore=False` the first action is taken
        bounded Box                `actions`, space's dtype[B, *shape], drawn uniformly whatever `explore` says

    If observations are a Dict space with `action_mask`, as in PettingZoo's classic games, an action whose mask is 0 is
    never chosen; for MultiDiscrete the mask has the parts end to end, or is a tuple of them. Raises ModuleError for
    other action spaces.
    """

    def setup(self) -> None:
        """Make the generator of Box actions, which `seed` replaces."""
        self.generator = np.random.default_rng()

    def seed(self, seed: int) -> None:
        """Seed the generator; a rollout calls this with a seed of its own and the module's id."""
        self.generator = np.random.default_rng(seed)

    def _forward(self, batch: Batch, **kwargs: Any) -> Batch:
        observations, space = batch[Columns.OBS], self.action_space
        leaf = leaves_of(observations)[0]
        if isinstance(space, gym.spaces.Discrete | gym.spaces.MultiDiscrete):
            count = int(space.n) if isinstance(space, gym.spaces.Discrete) else int(space.nvec.sum())
            logits = torch.zeros((len(leaf), count), device=leaf.device)
            if isinstance(observations, dict) and ACTION_MASK in observations:
                logits = logits.masked_fill(joined_mask(observations[ACTION_MASK]) == 0, -torch.inf)
            return {Columns.ACTION_DIST_INPUTS: logits}
        if isinstance(space, gym.spaces.Box) and space.is_bounded():
            return {Columns.ACTIONS: torch.from_numpy(self._drawn(space, len(leaf))).to(leaf.device)}
        raise ModuleError(
            f"RandomModule has no random actions for {space}, expected Discrete, MultiDiscrete or a bounded Box"
        )

    def _drawn(self, space: gym.spaces.Box, count: int) -> NDArray[Any]:
        shape = (count, *space.shape)
        if space.dtype.kind == "f":
            return self.generator.uniform(space.low, space.high, shape).astype(space.dtype)
        low, high = space.low.astype(np.int64), space.high.astype(np.int64)
        return self.generator.integers(low, high, shape, endpoint=True).astype(space.dtype)
