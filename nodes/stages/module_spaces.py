"""Action spaces of modules, held against those of the environments of their agents, and kinds of their states."""

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from rollflow.nodes.connectors.stateful import is_stateful
from rollflow.stream.data.errors import ModuleError
from rollflow.stream.data.space import item_of
from rollflow.stream.data.tree import Tree, map_tree
from rollflow.stream.multi_agent.agent_part import AgentPart


def check_actions(module: Any, expected: gym.Space[Any], agent: Any) -> None:
    """Raise ModuleError where a module chooses actions that are none in the space `expected`, that of an agent's."""
    own = module.action_space
    if not are_alike(own, expected):
        raise ModuleError(
            f"'{type(module).__name__}' was made for actions in {own}, but those of agent {agent!r} are in {expected}"
        )


def one_of(chosen: Mapping[Any, gym.Space[Any]], part: AgentPart) -> gym.Space[Any]:
    """The space in which what several modules choose, module id -> space, is recorded for the agents of a part.

    It is the modules' own if they all have one; else the agents', or any of the modules', whichever fits all of them.
    Raises ModuleError where none does.
    """
    spaces = list(chosen.values()) or [part.action_space]
    if any(_kind(space) != _kind(spaces[0]) for space in spaces):
        raise ModuleError(
            f"modules choose in {dict(chosen)}, but serve agents of one pair of spaces, as {part.agents[0]!r}; "
            "expected spaces of one structure, shape and dtype"
        )
    is_one = all(space == spaces[0] for space in spaces)
    return part.action_space if not is_one and _kind(part.action_space) == _kind(spaces[0]) else spaces[0]


def _kind(space: gym.Space[Any]) -> Any:
    """The structure, dtypes and shapes of an item."""
    return map_tree(lambda leaf: (leaf.dtype, leaf.shape), item_of(space))


def are_alike(one: Any, other: Any) -> bool:
    """True if actions of the one space are actions of the other, but for the bounds and the dtype of Boxes."""
    if type(one) is not type(other) or one.shape != other.shape:
        return False
    if isinstance(one, gym.spaces.Discrete):
        return bool(one.n == other.n and one.start == other.start)
    if isinstance(one, gym.spaces.MultiDiscrete):
        return np.array_equal(one.nvec, other.nvec) and np.array_equal(one.start, other.start)
    if isinstance(one, gym.spaces.Dict):
        return one.keys() == other.keys() and all(are_alike(one[key], other[key]) for key in one.keys())
    if isinstance(one, gym.spaces.Tuple):
        return len(one) == len(other) and all(map(are_alike, one, other))
    return True


def kind_of_state(module: Any) -> Tree:
    """Shapes and dtypes of a module's initial state, {} where it has none."""
    if not is_stateful(module):
        return {}
    arrays = map_tree(
        lambda leaf: leaf.cpu().numpy() if torch.is_tensor(leaf) else np.asarray(leaf), module.get_initial_state()
    )
    return map_tree(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", arrays)
