"""What a user gives a rollout, checked: modules, functions that make connector pieces, numbers."""

import copy
import inspect
import math
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import gymnasium as gym

from rollflow.nodes.connectors.connector_pipeline_v2 import ConnectorPipelineV2
from rollflow.nodes.connectors.connector_v2 import ConnectorV2
from rollflow.nodes.connectors.given_pieces import pieces_of
from rollflow.nodes.default_module import DefaultModule
from rollflow.nodes.env_source import is_whole
from rollflow.nodes.metrics_logger import MetricsLogger
from rollflow.stream.errors import ConnectorError, ModuleError

_SECONDS = ("max_wait", "step_timeout", "reset_timeout", "join_timeout", "linger")


def pieces_given(
    connector: Callable[..., Any] | None, name: str, *args: Any, spaces: tuple[Any, Any] | None = None
) -> list[ConnectorV2]:
    if connector is None:
        return []
    named = "env" if len(args) == 1 else "obs_space, act_space"
    check_connector(connector, name, named)
    signature = inspect.signature(connector)
    # RLlib's newer pages hand an environment's builder the spaces and a device as well.
    for given in (args, (*args, {"__env_single__": spaces}, None)):
        try:
            signature.bind(*given)
        except TypeError:
            continue
        return pieces_of(connector(*given), name)
    raise ConnectorError(f"{name} takes {signature}, expected ({named})")


def check_connector(connector: Any, name: str, named: str) -> None:
    """Raise ConnectorError for what is no function that makes connector pieces of what is `named`."""
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
    """The module given, with its spaces filled in, or a default one. Raises ModuleError for what is no module."""
    if module is None:
        return DefaultModule(observation_space, action_space, model_config=model_config)
    if model_config is not None:
        raise ModuleError("model_config is for the default module: give it to your module's constructor instead")
    if _makes_modules(module):
        module = _made(module, observation_space, action_space)
    for method in ("forward_exploration", "forward_inference", "state_dict", "load_state_dict"):
        if not callable(getattr(module, method, None)):
            raise ModuleError(
                f"module is {type(module).__name__}, which has no method {method}(); expected an RLModule, or a "
                "torch.nn.Module with forward_exploration(batch) and forward_inference(batch)"
            )
    for name, space in (("observation_space", observation_space), ("action_space", action_space)):
        if getattr(module, name, None) is None:
            setattr(module, name, space)
    _check_space(module, observation_space)
    return module


def copied_module(module: Any) -> Any:
    """What to give instead of `module`, where that is to stay as it is."""
    if not _makes_modules(module):
        return copy.deepcopy(module)

    def made(observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> Any:
        return copy.deepcopy(module(observation_space, action_space))

    return made


def copied_pieces(connector: Any) -> Any:
    """What to give instead of a function that makes connector pieces, where those that it may keep stay as they are."""
    if not callable(connector):
        return connector

    @wraps(connector)
    def made(*args: Any) -> Any:
        return copy.deepcopy(connector(*args))

    return made


def _makes_modules(module: Any) -> bool:
    return isinstance(module, type) or inspect.isfunction(module)


def _made(module: Any, *spaces: gym.Space[Any]) -> Any:
    """What makes modules, called. Raises ModuleError where it can't be called with the spaces."""
    try:
        signature = inspect.signature(module)
        signature.bind(*spaces)
    except TypeError:
        told = f"module is {module.__qualname__}, which takes {signature}, expected (observation_space, action_space)"
        raise ModuleError(f"{told}, or a module that is made already") from None
    except ValueError:  # it does not say
        pass
    return module(*spaces)


def _check_space(module: Any, space: gym.Space[Any]) -> None:
    given = module.observation_space
    if getattr(given, "shape", None) != space.shape:
        raise ModuleError(
            f"module '{type(module).__name__}' was made for observations in {given}, but those that come are in {space}"
        )


def acting_copy(module: Any, device: Any = None) -> Any:
    """A copy of the module that acts: `publish` alone changes it. It is in evaluation mode, and on the device given."""
    try:
        acting = copy.deepcopy(module)
    except Exception as error:
        raise ModuleError(
            f"module '{type(module).__name__}' can't be copied: {error}; a copy of it acts, so that training the one "
            "that was given does not change what is acting: expected it to hold nothing that can't be copied"
        ) from error
    if device is not None:
        try:
            acting.to(device)
        except (RuntimeError, AssertionError, TypeError) as error:  # torch's, which don't say whose it is
            raise ModuleError(f"device is {device!r}, to which the module can't go: {error}") from error
    acting.eval()
    return acting


def check_numbers(**numbers: tuple[float | None, int]) -> None:
    for name, (number, least) in numbers.items():
        if number is None:
            continue
        if not is_whole(number) and not (name in _SECONDS and isinstance(number, float) and math.isfinite(number)):
            raise ValueError(f"{name} is {number!r}, expected {'seconds' if name in _SECONDS else 'a whole number'}")
        if number < least:
            raise ValueError(f"{name} is {number}, expected at least {least}")


def check_for_rollouts(
    metrics: Any, max_batch: int | None, forward_in_thread: bool, compile_forward: Any, *, is_remote: bool
) -> None:
    if is_remote and compile_forward is not False:
        raise ValueError(
            "compile_forward is for forward passes here, and RemoteRollouts do theirs on the hosts; expected it to be "
            "given to each RolloutHost"
        )
    if max_batch is not None or forward_in_thread:
        given, expected = "where='rollouts' has", "where='threads' or where='processes'"
        if is_remote:
            given, expected = "RemoteRollouts have", "RemoteEnvs"
        raise ValueError(
            f"max_batch and forward_in_thread are for a forward pass over several lanes, but {given} one for each; "
            f"expected {expected}"
        )
    if metrics is not None and not isinstance(metrics, MetricsLogger):
        raise ValueError(
            f"metrics is {type(metrics).__name__}, expected a MetricsLogger: every worker has one, to be merged"
        )


def lookback_for(asked: int | None, pipelines: Iterable[ConnectorPipelineV2], *, stateful: bool) -> int:
    """Steps of lookback: what was asked for, or what is needed. Raises ValueError where the one is too little."""
    needed = {"a stateful module": int(stateful)}
    for pipeline in pipelines:
        for name, piece in pipeline.get_checkpointable_components():
            needed[name] = max(piece.lookback, needed.get(name, 0))
    most = max(needed, key=lambda name: needed[name])
    if asked is not None and asked < needed[most]:
        raise ValueError(f"lookback is {asked}, expected at least {needed[most]}: {most} looks back as far as that")
    return max(1, needed[most]) if asked is None else asked
