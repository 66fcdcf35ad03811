"""Spaces behind connectors that do not declare them, found by one item that is sent through."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rollflow.nodes.connectors.alpha.records import (
    AGENT_ID,
    ActionConnectorDataType,
    AgentConnectorDataType,
    AgentConnectorsOutput,
    SampleBatch,
)
from rollflow.nodes.connectors.spaces import Space
from rollflow.stream.data.errors import ConnectorError, shown
from rollflow.stream.data.space import item_of
from rollflow.stream.data.tree import Tree, map_tree

PROBE = "probe"
"""Environment id of the item that is sent through."""


def observation_of(data: Any) -> Any:
    """The observation in an agent's data, as it is recorded."""
    columns = data.raw_dict if isinstance(data, AgentConnectorsOutput) else data
    return columns[SampleBatch.NEXT_OBS]


def first_data(observation: Any) -> dict[str, Any]:
    """The data of an agent at the first step of an episode."""
    return {
        SampleBatch.NEXT_OBS: observation,
        SampleBatch.REWARDS: 0.0,
        SampleBatch.TERMINATEDS: False,
        SampleBatch.TRUNCATEDS: False,
        SampleBatch.INFOS: {},
        SampleBatch.T: -1,
        SampleBatch.ENV_ID: PROBE,
        SampleBatch.EPS_ID: PROBE,
        SampleBatch.AGENT_INDEX: 0,
    }


def space_after_observations(connector: Any, space: Space) -> Space:
    """The space behind an agent connector, which sees an observation of zeros, or the lowest ones that are allowed."""
    observation = sample_of(space)
    connector.in_eval()
    name = type(connector).__name__
    returned = connector([AgentConnectorDataType(PROBE, AGENT_ID, first_data(observation))])
    if len(returned) != 1:
        raise ConnectorError(f"{name} made {len(returned)} items of 1, expected one for each agent")
    return space_like(observation_of(returned[0].data), space)


def space_after_actions(connector: Any, space: Space) -> Space:
    """The space behind an action connector, which sees the space's first action."""
    connector.in_eval()
    given = ActionConnectorDataType(PROBE, AGENT_ID, {}, (sample_of(space), [], {}))
    return space_like(connector(given).output[0], space)


def sample_of(space: Space) -> Tree:
    """An item of a space: zeros where it has them, else its lowest numbers; `any[...]` by leaf."""
    if isinstance(space, spaces.Dict):
        return {key: sample_of(part) for key, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(sample_of(part) for part in space)
    if isinstance(space, spaces.Box):
        return np.clip(np.zeros(space.shape), space.low, space.high).astype(space.dtype)
    if isinstance(space, spaces.Discrete):
        return np.int64(space.start)
    if isinstance(space, spaces.MultiDiscrete):
        return np.array(space.start)
    return map_tree(np.asarray, item_of(space))


def space_like(item: Tree, space: Space | None) -> Space:
    """The space of an item: `space` where structure, shapes and dtypes are the same, else Boxes without bounds."""
    if space is not None and _kinds(item) == _kinds(sample_of(space)):
        return space
    if isinstance(item, dict):
        return spaces.Dict({key: space_like(part, part_of(space, key)) for key, part in item.items()})
    if isinstance(item, tuple):
        return spaces.Tuple([space_like(part, None) for part in item])
    array = np.asarray(item)
    if array.dtype.kind in "iu":
        limits = np.iinfo(array.dtype)
        return spaces.Box(limits.min, limits.max, array.shape, array.dtype.type)
    if array.dtype.kind != "f":
        raise ConnectorError(f"an item is {shown(item)}, {array.dtype}, expected numbers")
    return spaces.Box(-np.inf, np.inf, array.shape, array.dtype.type)


def part_of(space: Space | None, key: Any) -> gym.Space[Any] | None:
    """A part of a Dict space; None where there is none."""
    return space.spaces.get(key) if isinstance(space, spaces.Dict) else None


def _kinds(item: Tree) -> Tree:
    return map_tree(lambda leaf: (np.asarray(leaf).dtype.str, np.shape(leaf)), item)
