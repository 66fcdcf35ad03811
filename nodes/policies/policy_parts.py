"""The parts of a policy, made of what a caller gives: spaces, pipelines, and the pieces in them."""

import copy
from collections.abc import Hashable, Sequence
from typing import Any, TypeVar, cast

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rollflow.nodes.connectors.alpha.pieces import ActionConnectorPiece, AgentConnectorPiece
from rollflow.nodes.connectors.common.tensors import NumpyToTensor
from rollflow.nodes.connectors.connector_v2 import ConnectorV2
from rollflow.nodes.connectors.lambda_connector import LambdaConnector
from rollflow.nodes.connectors.pipelines.connector_pipeline_v2 import ConnectorPipelineV2
from rollflow.nodes.connectors.pipelines.default_pipelines import EnvToModulePipeline, pieces_within
from rollflow.nodes.connectors.stateful import is_stateful
from rollflow.stream.data.errors import PolicyError
from rollflow.stream.data.space import check_columnar, row_of
from rollflow.stream.data.tree import Tree, leaves_of, map_tree, stack_trees

Pieces = ConnectorPipelineV2 | Sequence[ConnectorV2] | None
_OURS = "rollflow.nodes.connectors."  # pieces that keep nothing of an episode but by its lookback
MOST_BYTES_REMEMBERED = 1 << 30  # of observations, in one session's lookback
P = TypeVar("P", bound=ConnectorPipelineV2)


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


def settled(pipelines: Sequence[ConnectorPipelineV2], device: Any, *, learns: bool) -> str:
    """Have the pieces use a torch device, and learn or not; the name of a piece that looks back to rewards, or ""."""
    needs_rewards = ""
    for piece in pieces_within(*pipelines):
        if isinstance(piece, NumpyToTensor):
            piece.device, piece.pin_memory = (None if device.type == "cpu" else device), False
        if not learns and getattr(piece, "update_stats", False):
            cast("Any", piece).update_stats = False
        if not learns and isinstance(piece, AgentConnectorPiece | ActionConnectorPiece):
            piece.pipeline.in_eval()
        if getattr(piece, "n_prev_rewards", 0):
            needs_rewards = piece.name
    return needs_rewards


def check_memory(space: gym.Space[Any], lookback: int) -> None:
    """Raise PolicyError where a session would remember too many bytes of observations."""
    size = sum(leaf.nbytes for leaf in leaves_of(row_of(space, 1))) * lookback
    if size > MOST_BYTES_REMEMBERED:
        raise PolicyError(
            f"a session would remember {lookback} observations of {space}, {size} bytes; expected at most "
            f"{MOST_BYTES_REMEMBERED}"
        )


def rows_of(observations: Tree, space: gym.Space[Any]) -> Tree:
    """Observations of a call as a tree of arrays any[N, ...]: such a tree, or a list of N observations."""
    if isinstance(observations, list) and observations:
        if isinstance(space, gym.spaces.Box) and space.dtype.kind == "f":
            return np.array(observations, space.dtype)
        return stack_trees(observations)
    return map_tree(np.asarray, observations)


def ids_of(observations: Tree, sessions: Sequence[Hashable] | None) -> tuple[Hashable, ...]:
    """The sessions of a call with observations, a tree of arrays any[N, ...]: those given, or 0 … N - 1.

    Raises PolicyError where they are not N, and where there is no observation.
    """
    leaves = leaves_of(observations)
    count = len(leaves[0]) if leaves and leaves[0].ndim else 0
    ids = tuple(range(count)) if sessions is None else tuple(sessions)
    if len(ids) != count or not count:
        raise PolicyError(f"{count} observations for {len(ids)} sessions, expected one for each, and at least one")
    return ids


def rewards_of(rewards: Any, count: int) -> NDArray[np.float32] | None:
    """The rewards of a call as an array f32[count]; None: none came. Raises PolicyError for another shape."""
    if rewards is None:
        return None
    array = np.asarray(rewards, np.float32)
    if array.shape != (count,):
        raise PolicyError(f"rewards are f32{list(array.shape)}, expected f32[{count}], one for each session")
    return array


def infos_of(infos: Sequence[Any] | None, count: int) -> Sequence[Any] | None:
    """The infos of a call; None: they are empty. Raises PolicyError unless there are `count`."""
    if infos is not None and len(infos) != count:
        raise PolicyError(f"{len(infos)} infos for {count} sessions, expected one for each")
    return infos


def rewards_missing(piece: str) -> PolicyError:
    """The error of a call without rewards where a piece of this name looks back to them."""
    return PolicyError(
        f"'{piece}' looks back to rewards, but none came for sessions that go on; expected the reward of "
        "each session's action before"
    )
