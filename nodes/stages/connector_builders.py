"""Modules and connector pieces, made of what a user gives: instances, classes, functions."""

import copy
import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import gymnasium as gym
import torch

from rollflow.nodes.connectors.connector_v2 import ConnectorV2
from rollflow.nodes.connectors.pipelines.connector_pipeline_v2 import ConnectorPipelineV2, pieces_of
from rollflow.nodes.modules.default_module import DefaultModule
from rollflow.nodes.modules.given_module import GivenModule, is_function, is_given
from rollflow.stream.data.errors import ConnectorError, ModuleError, noted, page_on


def pieces_given(
    connector: Callable[..., Any] | None, name: str, *args: Any, spaces: tuple[Any, Any] | None = None
) -> list[ConnectorV2]:
    """The pieces that a function of this name makes of its arguments; none for None.

    spaces    of observations and actions, for functions in the form of RLlib's newer pages

    Raises ConnectorError for what is no such function, or makes other things.
    """
    if connector is None:
        return []
    named = "env" if len(args) == 1 else "obs_space, act_space"
    check_connector(connector, name, named)
    signature = inspect.signature(connector)
    # RLlib's newer pages hand an environment's builder the spaces and a device as well.
    for passed in (args, (*args, {"__env_single__": spaces}, None)):
        try:
            signature.bind(*passed)
        except TypeError:
            continue
        return pieces_of(connector(*passed), name)
    raise ConnectorError(f"{name} takes {signature}, expected ({named})")


def check_connector(connector: Any, name: str, named: str) -> None:
    """Raise ConnectorError for what is no function that makes connector pieces; `named` are its parameters."""
    if not callable(connector) or isinstance(connector, ConnectorV2):
        raise ConnectorError(
            f"{name} is {connector!r}, expected a function that returns a piece or a list of pieces, such as "
            f"lambda {named}: MyPiece()"
        )
    if isinstance(connector, type) and issubclass(connector, ConnectorV2):
        raise ConnectorError(
            f"{name} is the class {connector.__name__}, expected lambda {named}: {connector.__name__}()"
        )


def module_for(module: Any, model_config: Any, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> Any:
    """The module, with its spaces filled in, or a default one for None. Raises ModuleError for what is no module."""
    if module is None:
        return DefaultModule(observation_space, action_space, model_config=model_config)
    if model_config is not None:
        raise ModuleError("model_config is for the default module: give it to your module's constructor instead")
    if _makes_modules(module):
        module = _made(module, observation_space, action_space)
    if is_given(module):
        spaces = getattr(module, "observation_space", None), getattr(module, "action_space", None)
        module = GivenModule(*spaces, model_config={"given": module})
    if isinstance(module, torch.nn.Module) and "_modules" not in vars(module):
        name = type(module).__name__
        raise ModuleError(f"{name}.__init__ did not call super().__init__(), expected that first").see("module")
    for method in ("forward_exploration", "forward_inference", "state_dict", "load_state_dict"):
        if not callable(getattr(module, method, None)):
            raise ModuleError(
                f"module is {type(module).__name__}, which has no method {method}(); expected an RLModule, an object "
                "with forward_exploration(batch) and forward_inference(batch), or a function of observations"
            ).see("module")
    for name, space in (("observation_space", observation_space), ("action_space", action_space)):
        if getattr(module, name, None) is None:
            setattr(module, name, space)
    _check_space(module, observation_space)
    return module


def copied_module(module: Any) -> Any:
    """A copy of a module, or a function that makes copies of what the function `module` makes."""
    if not _makes_modules(module):
        return copy.deepcopy(module)

    def made(observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> Any:
        return copy.deepcopy(module(observation_space, action_space))

    return made


def copied_pieces(connector: Any) -> Any:
    """A function that makes copies of the connector pieces that `connector` makes, which may keep its own."""
    if not callable(connector):
        return connector

    @wraps(connector)
    def made(*args: Any) -> Any:
        return copy.deepcopy(connector(*args))

    return made


def _makes_modules(module: Any) -> bool:
    return isinstance(module, type) or (inspect.isfunction(module) and not is_function(module))


def _made(module: Any, *spaces: gym.Space[Any]) -> Any:
    """The module that a class or function makes. Raises ModuleError where it can't be called with the spaces."""
    try:
        signature = inspect.signature(module)
        signature.bind(*spaces)
    except TypeError:
        raise ModuleError(
            f"module is {module.__qualname__}, which takes {signature}, expected (observation_space, action_space), "
            "(observations) of a function that chooses actions itself, or a module that is made already"
        ) from None
    except ValueError:  # it has no signature
        pass
    observations, actions = spaces
    with noted(f"where a module is made for observations in {observations}, actions in {actions}; {page_on('module')}"):
        return module(*spaces)


def _check_space(module: Any, space: gym.Space[Any]) -> None:
    own = module.observation_space
    if getattr(own, "shape", None) != space.shape:
        raise ModuleError(
            f"module '{type(module).__name__}' was made for observations in {own}, but those that come are in {space}"
        ).see("spaces")


def acting_copy(module: Any, device: Any = None) -> Any:
    """A copy of a module that acts, that `publish` alone changes: in evaluation mode, on the device if one is given."""
    try:
        acting = copy.deepcopy(module)
    except Exception as error:
        raise ModuleError(
            f"module '{type(module).__name__}' can't be copied: {error}; a copy of it acts, so that training the one "
            "that was given does not change what is acting: expected it to hold nothing that can't be copied"
        ).see("module") from error
    if device is not None:
        try:
            acting.to(device)
        except (RuntimeError, AssertionError, TypeError) as error:  # torch's, which don't say whose it is
            raise ModuleError(f"device is {device!r}, to which the module can't go: {error}") from error
    acting.eval()
    return acting


def lookback_for(lookback: int | None, pipelines: Iterable[ConnectorPipelineV2], *, stateful: bool) -> int:
    """Steps of lookback: those asked for, or for None those needed. Raises ValueError for fewer than needed."""
    needed = {"a stateful module": int(stateful)}
    for pipeline in pipelines:
        for name, piece in pipeline.get_checkpointable_components():
            needed[name] = max(piece.lookback, needed.get(name, 0))
    most = max(needed, key=lambda name: needed[name])
    if lookback is not None and lookback < needed[most]:
        raise ValueError(f"lookback is {lookback}, expected at least {needed[most]}: {most} looks back as far as that")
    return max(1, needed[most]) if lookback is None else lookback
