"""Agent connectors that change or add columns: observations, rewards, and the policy's last output."""

from typing import Any

import numpy as np
from gymnasium import spaces

from rollflow.nodes.connectors.alpha.connector import AgentConnector, ConnectorContext
from rollflow.nodes.connectors.alpha.probing import sample_of
from rollflow.nodes.connectors.alpha.records import (
    ActionConnectorDataType,
    AgentConnectorDataType,
    AgentConnectorsOutput,
    PolicyOutputType,
    SampleBatch,
)
from rollflow.nodes.connectors.alpha.registry import register_connector
from rollflow.nodes.connectors.spaces import Space
from rollflow.stream.data.errors import ConnectorError, shown
from rollflow.stream.data.space import flat_size, flatten, is_columnar
from rollflow.stream.data.tree import Tree, leaves_of, map_tree

OBSERVATIONS = (SampleBatch.OBS, SampleBatch.NEXT_OBS)


def columns_of(connector: AgentConnector, ac_data: AgentConnectorDataType) -> dict[str, Any]:
    """The columns of an agent's data. Raises ConnectorError where they are the policy's input already."""
    data = ac_data.data
    if not isinstance(data, dict):
        raise ConnectorError(
            f"{type(connector).__name__}: the data of agent {ac_data.agent_id!r} of environment {ac_data.env_id!r} are "
            f"{type(data).__name__}, expected a dict of columns; it stands before ViewRequirementAgentConnector"
        )
    return data


class ObsPreprocessorConnector(AgentConnector):
    """Turns observations in Discrete, MultiDiscrete, Dict and Tuple spaces into vectors, f32[D]; Boxes stay.

    Whole numbers become one-hot vectors. The space is the context's, or the `original_space` of that. Raises
    ConnectorError for a space that has no numbers in it, and for observations that are not in it.
    """

    def transform(self, ac_data: AgentConnectorDataType) -> AgentConnectorDataType:
        space = original_space(self.context, self)
        if isinstance(space, spaces.Box):
            return ac_data
        data = columns_of(self, ac_data)
        for name in OBSERVATIONS:
            if name in data:
                data[name] = self._flat(space, data[name])
        return ac_data

    def observation_space_after(self, observation_space: Space) -> Space:
        if isinstance(observation_space, spaces.Box):
            return observation_space
        self._check(observation_space)
        return spaces.Box(-np.inf, np.inf, (flat_size(observation_space),), np.float32)

    def to_state(self) -> tuple[str, Any]:
        return "ObsPreprocessorConnector", None

    def _flat(self, space: Space, observation: Any) -> Any:
        self._check(space)
        try:
            rows = map_tree(lambda leaf: np.asarray(leaf)[None], observation)
            return flatten(space, rows)[0]
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise ConnectorError(
                f"ObsPreprocessorConnector: an observation is {shown(observation)}, expected one in {space}"
            ) from error

    def _check(self, space: Space) -> None:
        if not is_columnar(space):
            raise ConnectorError(
                f"ObsPreprocessorConnector can't make vectors of observations in {space}; expected Box, Discrete, "
                "MultiDiscrete, MultiBinary, or a Dict or Tuple of those"
            )


def original_space(ctx: ConnectorContext, connector: AgentConnector) -> Space:
    """The space of the environment's observations. Raises ConnectorError where the context has none."""
    space = ctx.observation_space
    if space is None:
        raise ConnectorError(
            f"{type(connector).__name__}: the context has no observation_space, expected "
            "ConnectorContext(observation_space=…)"
        )
    original: Space = getattr(space, "original_space", space)
    return original


class FlattenDataAgentConnector(AgentConnector):
    """Turns every column that is a tree or an array into one vector; single numbers, infos and states stay.

    Actions stay as well. Parts of a dict come by sorted key. In the policy's input the batch axis stays.
    """

    def transform(self, ac_data: AgentConnectorDataType) -> AgentConnectorDataType:
        data = ac_data.data
        if isinstance(data, AgentConnectorsOutput):
            flat = SampleBatch({name: self._flat(name, value, 1) for name, value in data.sample_batch.items()})
            made: Any = AgentConnectorsOutput(data.raw_dict, flat, data.for_training)
        else:
            made = {name: self._flat(name, value, 0) for name, value in columns_of(self, ac_data).items()}
        return AgentConnectorDataType(ac_data.env_id, ac_data.agent_id, made)

    def _flat(self, name: str, value: Tree, leading: int) -> Any:
        if value is None or name in (SampleBatch.INFOS, SampleBatch.ACTIONS) or name.startswith("state_"):
            return value
        leaves = [np.asarray(leaf) for leaf in leaves_of(value)]
        if len(leaves) == 1 and leaves[0].ndim <= leading:
            return value
        if not leaves or any(leaf.dtype.kind not in "biuf" for leaf in leaves):
            return value
        return np.concatenate([leaf.reshape(*leaf.shape[:leading], -1) for leaf in leaves], axis=-1)

    def to_state(self) -> tuple[str, Any]:
        return "FlattenDataAgentConnector", None


class ClipRewardAgentConnector(AgentConnector):
    """Replaces rewards by their sign, or clips them to -limit … limit; does nothing without either.

    Raises ConnectorError for both, and for a limit that is not more than 0.
    """

    def __init__(self, ctx: ConnectorContext | None = None, sign: bool = False, limit: float | None = None) -> None:
        super().__init__(ctx)
        if sign and limit:
            raise ConnectorError(f"ClipRewardAgentConnector: sign is True and limit is {limit}, expected one of them")
        if limit is not None and not limit > 0:
            raise ConnectorError(f"ClipRewardAgentConnector: limit is {limit}, expected more than 0, or None")
        self.sign, self.limit = sign, limit

    def transform(self, ac_data: AgentConnectorDataType) -> AgentConnectorDataType:
        data = columns_of(self, ac_data)
        if SampleBatch.REWARDS in data:
            if self.sign:
                data[SampleBatch.REWARDS] = np.sign(data[SampleBatch.REWARDS])
            elif self.limit is not None:
                data[SampleBatch.REWARDS] = np.clip(data[SampleBatch.REWARDS], -self.limit, self.limit)
        return ac_data

    def observation_space_after(self, observation_space: Space) -> Space:
        return observation_space

    def to_state(self) -> tuple[str, Any]:
        return "ClipRewardAgentConnector", {"sign": self.sign, "limit": self.limit}


class EnvSamplingAgentConnector(AgentConnector):
    """Passes data on: it marks the place where data of an environment come in."""

    def transform(self, ac_data: AgentConnectorDataType) -> AgentConnectorDataType:
        return ac_data

    def to_state(self) -> tuple[str, Any]:
        return "EnvSamplingAgentConnector", None


class StateBufferConnector(AgentConnector):
    """Adds the last output of the policy: `actions`, `state_out_0` and so on, and what it gave beside.

    At the start of an episode actions are zeros in the context's action space, and states its initial ones. What is
    buffered belongs to episodes under way, and is no part of the saved connector.
    """

    def __init__(self, ctx: ConnectorContext | None = None) -> None:
        super().__init__(ctx)
        self._outputs: dict[str, dict[str, PolicyOutputType]] = {}

    def reset(self, env_id: str) -> None:
        self._outputs.pop(env_id, None)

    def on_policy_output(self, output: ActionConnectorDataType) -> None:
        self._outputs.setdefault(output.env_id, {})[output.agent_id] = output.output

    def transform(self, ac_data: AgentConnectorDataType) -> AgentConnectorDataType:
        data = columns_of(self, ac_data)
        output = self._outputs.get(ac_data.env_id, {}).get(ac_data.agent_id)
        if output is None:
            space = self.context.action_space
            actions, states = (None if space is None else sample_of(space)), self.context.initial_states
            fetches: Any = {}
        else:
            actions, states, fetches = output
        if actions is not None:
            data[SampleBatch.ACTIONS] = actions
        data.update({f"state_out_{i}": state for i, state in enumerate(states)})
        data.update(fetches)
        return ac_data

    def observation_space_after(self, observation_space: Space) -> Space:
        return observation_space

    def to_state(self) -> tuple[str, Any]:
        return "StateBufferConnector", None


register_connector("ObsPreprocessorConnector", ObsPreprocessorConnector)
register_connector("FlattenDataAgentConnector", FlattenDataAgentConnector)
register_connector("ClipRewardAgentConnector", ClipRewardAgentConnector)
register_connector("EnvSamplingAgentConnector", EnvSamplingAgentConnector)
register_connector("StateBufferConnector", StateBufferConnector)
