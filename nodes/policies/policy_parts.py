"""The parts of a policy, made of what a caller gives: spaces, pipelines, and the pieces in them."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, cast

import gymnasium as gym

from rollflow.nodes.connectors.connector_v2 import ConnectorV2
from rollflow.nodes.connectors.lambda_connector import LambdaConnector
from rollflow.nodes.connectors.pipelines.connector_pipeline_v2 import ConnectorPipelineV2
from rollflow.nodes.connectors.pipelines.default_pipelines import EnvToModulePipeline
from rollflow.nodes.connectors.stateful import is_stateful
from rollflow.stream.data.errors import PolicyError
from rollflow.stream.data.space import check_columnar

Pieces = ConnectorPipelineV2 | Sequence[ConnectorV2] | None
_OURS = "rollflow.nodes.connectors."  # pieces that keep nothing of an episode but by its lookback
P = TypeVar("P", bound=ConnectorPipelineV2)


def pieces_within(*pipelines: ConnectorPipelineV2) -> Iterator[ConnectorV2]:
    """Every piece of the pipelines, those of nested pipelines included."""
    for piece in (piece for pipeline in pipelines for piece in pipeline):
        if isinstance(piece, ConnectorPipelineV2):
            yield from pieces_within(piece)
        else:
            yield piece


def has_memory(module: Any, *pipelines: ConnectorPipelineV2) -> bool:
    """True if an action may depend on more than the observation: on the module's state, or on what a piece keeps."""
    return is_stateful(module) or any(
        piece.lookback or isinstance(piece, LambdaConnector) or not type(piece).__module__.startswith(_OURS)
        for piece in pieces_within(*pipelines)
    )


def pipeline_of(kind: type[P], pieces: Pieces, spaces: tuple[gym.Space[Any], gym.Space[Any]], *, stateful: bool) -> P:
    """A copy of the pipeline, or the default one with copies of the pieces."""
    copied = copy.deepcopy(pieces)
    if not isinstance(copied, ConnectorPipelineV2):
        made: P = cast("Any", kind).default(*spaces, list(copied or ()), stateful=stateful)
        return made
    if not isinstance(copied, kind):
        raise PolicyError(f"a {type(copied).__name__} was given, expected a {kind.__name__}, or a list of pieces")
    if copied.input_observation_space is None or copied.input_action_space is None:
        copied.set_input_spaces(*spaces)
    return copied


def spaces_of(pieces: Pieces, *spaces: gym.Space[Any] | None) -> tuple[gym.Space[Any], gym.Space[Any]]:
    """The environments' spaces, as they were given or as the pipeline has them."""
    found: list[gym.Space[Any]] = []
    for name, space in zip(("observation_space", "action_space"), spaces, strict=True):
        own = getattr(pieces, f"input_{name}", None) if space is None else space
        if not isinstance(own, gym.Space):
            raise PolicyError(f"{name} is {space!r}, expected a gymnasium space, or env_to_module of a rollout")
        check_columnar(own, name)
        found.append(own)
    return found[0], found[1]


def seen_spaces(pieces: Pieces, spaces: tuple[gym.Space[Any], gym.Space[Any]]) -> tuple[Any, Any]:
    """The spaces that the pieces leave: of what the module sees, and of what it chooses."""
    pipeline = pieces
    if not isinstance(pieces, ConnectorPipelineV2):
        pipeline = EnvToModulePipeline(*spaces, connectors=copy.deepcopy(list(pieces or ())))
    assert isinstance(pipeline, ConnectorPipelineV2)
    left = pipeline.observation_space, pipeline.action_space
    return left[0] or spaces[0], left[1] or spaces[1]
