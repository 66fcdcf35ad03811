"""Neural networks as a rollout and a learner see them, with the interfaces of RLlib's modules."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import Any, Self, TypeVar

import gymnasium as gym
import torch

from rollflow.nodes.argument_checks import checked_count
from rollflow.nodes.modules.distribution import DistributionType, distribution_for
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ModuleError, more_than_one, shown
from rollflow.stream.data.tree import leaves_of

Batch = dict[str, Any]


class RLModule(torch.nn.Module):
    """Torch module with three forward passes; a subclass overrides `setup` and `_forward`, or each pass by itself.

        observation_space, action_space    of the environment; a rollout fills in what is None
        model_config                       free for the subclass to use

    A batch is a dict, column -> tensor `any[B, ...]`, to be read only: while acting its observations are the very rows
    that are recorded. The output is a dict with `actions`, or with `action_dist_inputs` f32[B, D], whose width `D`
    `rollflow.nodes.modules.distribution` gives. Value-based pieces look for `vf_preds`, f32[B]. All of the output is
    recorded with the steps.
    """

    framework = "torch"
    masks_actions = True  # False: it is known to rule no action out by a finite logit, so that nobody need look for it

    def __init__(
        self,
        observation_space: gym.Space[Any] | None = None,
        action_space: gym.Space[Any] | None = None,
        *,
        inference_only: bool = False,
        model_config: Any = None,
    ) -> None:
        super().__init__()
        self.observation_space = observation_space
        self.action_space = action_space
        self.inference_only = inference_only
        self.model_config = {} if model_config is None else model_config
        self._distribution_made: DistributionType | None = None
        self.setup()

    def setup(self) -> None:
        """Make the network's parts; called once, by the constructor."""

    def forward_exploration(self, batch: Batch, **kwargs: Any) -> Batch:
        """Forward pass for actions that are sampled."""
        return self._forward_exploration(batch, **kwargs)

    def forward_inference(self, batch: Batch, **kwargs: Any) -> Batch:
        """Forward pass for the likeliest actions."""
        return self._forward_inference(batch, **kwargs)

    def forward_train(self, batch: Batch, **kwargs: Any) -> Batch:
        """Forward pass for losses. Raises ModuleError for `vf_preds` of another shape than one number for each row."""
        output = self._forward_train(batch, **kwargs)
        names = (Columns.VF_PREDS, Columns.ACTION_DIST_INPUTS)
        values, inputs = map(output.get, names) if isinstance(output, dict) else (None, None)
        if torch.is_tensor(values) and torch.is_tensor(inputs) and 1 < values.ndim >= inputs.ndim:
            text = more_than_one(Columns.VF_PREDS, values.shape, values.shape[: inputs.ndim - 1])
            raise ModuleError(f"{type(self).__name__}.forward_train: {text}").see("module")
        return output

    def forward(self, batch: Batch, **kwargs: Any) -> Batch:
        """`forward_train`, for callers of the module itself."""
        return self.forward_train(batch, **kwargs)

    def _forward_exploration(self, batch: Batch, **kwargs: Any) -> Batch:
        return self._forward(batch, **kwargs)

    def _forward_inference(self, batch: Batch, **kwargs: Any) -> Batch:
        return self._forward(batch, **kwargs)

    def _forward_train(self, batch: Batch, **kwargs: Any) -> Batch:
        return self._forward(batch, **kwargs)

    def _forward(self, batch: Batch, **kwargs: Any) -> Batch:
        raise ModuleError(
            f"{type(self).__name__} does not say how it goes forward: override _forward, or _forward_exploration, "
            "_forward_inference and _forward_train"
        ).see("module")

    def compute_values(self, batch: Batch, embeddings: Any = None) -> torch.Tensor:
        """Value of each observation, f32[B]; `vf_preds` of `forward_train` unless overridden.

        Raises ModuleError if there are none.
        """
        output = self.forward_train(batch)
        if Columns.VF_PREDS not in output:
            raise ModuleError(
                f"{type(self).__name__}.forward_train gave {sorted(output)}, expected '{Columns.VF_PREDS}' among them: "
                "add it, or override compute_values"
            ).see("module")
        values: torch.Tensor = output[Columns.VF_PREDS]
        return values

    def is_stateful(self) -> bool:
        """True if a forward pass needs state that the one before returned."""
        state = self.get_initial_state()
        # Called for stateless modules in every vector step, so it has to be quick.
        return state is not None and not (type(state) is dict and not state) and bool(leaves_of(state))

    def get_initial_state(self) -> Any:
        """Initial state: a tree of arrays or tensors any[...] without a batch axis; `{}` for a stateless module.

        A forward pass's `state_out` has the same structure, shapes and dtypes, with a batch axis first.
        """
        return {}

    def get_exploration_action_dist_cls(self) -> DistributionType:
        """Type of the distribution that explored actions are sampled from."""
        return self._distribution_type()

    def get_inference_action_dist_cls(self) -> DistributionType:
        """Type of the distribution whose likeliest action is taken."""
        return self._distribution_type()

    def get_train_action_dist_cls(self) -> DistributionType:
        """Type of the distribution that losses are computed with."""
        return self._distribution_type()

    def _distribution_type(self) -> DistributionType:
        space = self.action_space
        if space is None:
            raise ModuleError(f"{type(self).__name__} has no action_space: give it to the constructor, or set it")
        made = self._distribution_made
        if made is None or made.space is not space:
            made = self._distribution_made = distribution_for(space)
        return made


class MultiRLModule(Mapping[Any, Any]):
    """Modules by id, each with its own weights: a mapping.

        modules    id -> an `RLModule`, or whatever else has `forward_exploration` and `forward_inference`

    Raises ModuleError if there are none, and for an id that is taken or unknown.
    """

    framework = "torch"

    def __init__(self, modules: Mapping[Any, Any]) -> None:
        if not isinstance(modules, Mapping) or not modules:
            raise ModuleError(f"modules are {shown(modules)}, expected a dict with at least one: module id -> module")
        self._modules = dict(modules)

    def __getitem__(self, module_id: Any) -> Any:
        try:
            return self._modules[module_id]
        except KeyError:
            raise ModuleError(f"there is no module '{module_id}', expected one of {list(self._modules)}") from None

    def __contains__(self, module_id: object) -> bool:
        return module_id in self._modules

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._modules))

    def __len__(self) -> int:
        return len(self._modules)

    def __repr__(self) -> str:
        modules = ", ".join(f"{module_id!r}: {type(module).__name__}" for module_id, module in self._items())
        return f"<{type(self).__name__} {modules}>"

    def get(self, module_id: Any, default: Any = None) -> Any:
        """Return the module of an id, or `default`."""
        return self._modules.get(module_id, default)

    def add_module(self, module_id: Any, module: Any, *, override: bool = False) -> None:
        """Add a module, with `override` in place of one with the same id. A rollout's are those that it was given."""
        if not override and module_id in self._modules:
            raise ModuleError(f"there is a module '{module_id}' already, expected another id, or remove_module first")
        self._modules[module_id] = module

    def remove_module(self, module_id: Any, *, raise_err_if_not_found: bool = True) -> Any:
        """Remove a module and return it; None if there is none and that is no error."""
        module = self[module_id] if raise_err_if_not_found else self.get(module_id)
        self._modules.pop(module_id, None)
        return module

    # Forward passes take module id -> batch, of some of the modules, and give module id -> output.

    def forward_exploration(self, batch: Mapping[Any, Batch], **kwargs: Any) -> dict[Any, Batch]:
        """Forward passes for actions that are sampled."""
        return {module_id: self[module_id].forward_exploration(own, **kwargs) for module_id, own in batch.items()}

    def forward_inference(self, batch: Mapping[Any, Batch], **kwargs: Any) -> dict[Any, Batch]:
        """Forward passes for the likeliest actions."""
        return {module_id: self[module_id].forward_inference(own, **kwargs) for module_id, own in batch.items()}

    def forward_train(self, batch: Mapping[Any, Batch], **kwargs: Any) -> dict[Any, Batch]:
        """Forward passes for losses."""
        return {module_id: self[module_id].forward_train(own, **kwargs) for module_id, own in batch.items()}

    def __call__(self, batch: Mapping[Any, Batch], **kwargs: Any) -> dict[Any, Batch]:
        """`forward_train`."""
        return self.forward_train(batch, **kwargs)

    # Torch's interface, for the modules that are networks

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Yield the parameters of all modules, for an optimizer."""
        return (parameter for _, parameter in self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield all parameters with their names: the module's id, a dot, the name in the module."""
        for module_id, network in self._networks():
            for name, parameter in network.named_parameters():
                yield f"{module_id}.{name}", parameter

    def to(self, device: Any) -> Self:
        """Move all modules to a device."""
        for _, network in self._networks():
            network.to(device)
        return self

    def train(self, mode: bool = True) -> Self:
        """Put all modules into training mode, or out of it."""
        for _, network in self._networks():
            network.train(mode)
        return self

    def eval(self) -> Self:
        """Put all modules into evaluation mode."""
        return self.train(False)

    def state_dict(self) -> dict[Any, dict[str, Any]]:
        """Return module id -> the module's `state_dict()`."""
        return {module_id: module.state_dict() for module_id, module in self._items()}

    def load_state_dict(self, state: Mapping[Any, Mapping[str, Any]]) -> None:
        """Load what `state_dict` gave, into the modules that it names."""
        for module_id, weights in state.items():
            self[module_id].load_state_dict(weights)

    get_state = state_dict
    set_state = load_state_dict

    def _items(self) -> list[tuple[Any, Any]]:
        """Ids and modules as they are now: another thread may add modules meanwhile."""
        return list(self._modules.items())

    def _networks(self) -> Iterator[tuple[Any, torch.nn.Module]]:
        return (item for item in self._items() if isinstance(item[1], torch.nn.Module))


DEFAULT_MAX_SEQ_LEN = 20


def is_stateful(rl_module: Any) -> bool:
    """True if a module's forward pass takes `state_in`; False for a module without `is_stateful()`."""
    method = getattr(rl_module, "is_stateful", None)
    return method is not None and bool(method())


def max_seq_len_of(rl_module: Any) -> int:
    """Steps in a row of a stateful module's train batch, by its `model_config`. Raises ModuleError unless >= 1."""
    config = getattr(rl_module, "model_config", None)
    length = config.get("max_seq_len") if isinstance(config, dict) else getattr(config, "max_seq_len", None)
    try:
        return checked_count("max_seq_len", DEFAULT_MAX_SEQ_LEN if length is None else length, 1)
    except ValueError as error:
        raise ModuleError(f"model_config of {type(rl_module).__name__}: {error}") from None


_MARK = "_is_evaluating_view"
_HOLDERS = {dict, OrderedDict, list, tuple}


def evaluating(module: Any) -> Any:
    """A view of a module in evaluation mode, which shares the parameters and has copies of the buffers.

    Passes of the view leave no trace in the module: its mode, its statistics and its other attributes stay, and another
    thread may train it meanwhile. A compiled module runs uncompiled. An object without a `__dict__` is returned as it
    is, a dict with views of its values.
    """
    if type(module) is dict:
        return {key: evaluating(value) for key, value in module.items()}
    if isinstance(module, type) or _MARK in getattr(module, "__dict__", {_MARK: None}):
        return module
    view = _view_of(module, {})
    if not isinstance(view, torch.nn.Module) and callable(getattr(view, "eval", None)):
        view.eval()
    return view


def _view_of(owner: Any, views: dict[int, Any]) -> Any:
    """The view of a module, or of an object that has modules; `views` has those made so far, by the owner's id."""
    if isinstance(owner, torch.jit.ScriptModule):
        return views.setdefault(id(owner), copy.deepcopy(owner).eval())
    if "_orig_mod" in vars(owner).get("_modules", ()):  # what torch.compile makes runs the original, not its own child
        return _seen(owner._modules["_orig_mod"], views)
    try:
        view = views[id(owner)] = object.__new__(type(owner))
    except TypeError:  # an extension type: only its own constructor makes objects
        return owner
    attributes = vars(view)
    attributes.update(vars(owner))
    for name, value in vars(owner).items():
        if type(value) in _HOLDERS and (value or type(value) is not OrderedDict):  # empty ones are torch's hooks
            attributes[name] = _seen(value, views)
        elif isinstance(value, torch.nn.Module | MethodType):
            attributes[name] = _seen(value, views)
    attributes[_MARK] = True
    if isinstance(view, torch.nn.Module):
        buffers = vars(owner)["_buffers"].items()
        attributes["_buffers"] = {name: value if value is None else value.detach().clone() for name, value in buffers}
        attributes |= {"training": False, "_compiled_call_impl": None}
    return view


def _seen(value: Any, views: dict[int, Any]) -> Any:
    """The value of an attribute, with views in place of modules and copies of lists and dicts."""
    if id(value) in views:
        return views[id(value)]
    if isinstance(value, torch.nn.Module):
        return _view_of(value, views)
    if type(value) is MethodType and isinstance(value.__self__, torch.nn.Module):
        return MethodType(value.__func__, _seen(value.__self__, views))
    if type(value) is tuple:
        return tuple(_seen(item, views) for item in value)
    if type(value) is list:
        items = views[id(value)] = []
        items += [_seen(item, views) for item in value]
        return items
    if type(value) in _HOLDERS:
        entries = views[id(value)] = type(value)()
        for key, item in value.items():
            entries[key] = _seen(item, views)
        return entries
    return value


A = TypeVar("A")
T = TypeVar("T")


def with_threads(count: int | None, function: Callable[[A], T]) -> Callable[[A], T]:
    """The function, run while torch uses `count` threads; afterwards it uses as many as before.

    count    None: the function itself, which leaves torch's number as it is

    On a busy processor, threads that wait for each other may take milliseconds for an operation of microseconds. One
    thread at a time may call the function.
    """
    if count is None:
        return function

    def run(argument: A) -> T:
        before = torch.get_num_threads()
        if count == before:
            return function(argument)
        torch.set_num_threads(count)
        try:
            return function(argument)
        finally:
            torch.set_num_threads(before)

    return run
