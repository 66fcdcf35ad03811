"""Agent connectors that change or add columns, and action connectors: arrays of tensors, bounds, read-only actions."""

import types
from dataclasses import replace
from typing import Any

import numpy as np
from gymnasium import spaces

from rollflow.nodes.connectors.alpha.connector import (
    ActionConnector,
    ActionConnectorDataType,
    AgentConnector,
    AgentConnectorDataType,
    AgentConnectorsOutput,
    ConnectorContext,
    PolicyOutputType,
    SampleBatch,
    array_of,
    sample_of,
    without_params,
)
from rollflow.nodes.connectors.module_to_env.normalize_and_clip_actions import NormalizeAndClipActions
from rollflow.nodes.connectors.spaces import Space, check_has_numbers
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ConnectorError, shown
from rollflow.stream.data.space import flat_size, flatten
from rollflow.stream.data.tree import Tree, map_tree

OBSERVATIONS = (SampleBatch.OBS, SampleBatch.NEXT_OBS)
UNFIT = "ObsPreprocessorConnector can't make vectors of observations"


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
        check_has_numbers(observation_space, UNFIT)
        return spaces.Box(-np.inf, np.inf, (flat_size(observation_space),), np.float32)

    to_state = without_params

    def _flat(self, space: Space, observation: Any) -> Any:
        check_has_numbers(space, UNFIT)
        try:
            rows = map_tree(lambda leaf: np.asarray(leaf)[None], observation)
            return flatten(space, rows)[0]
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise ConnectorError(
                f"ObsPreprocessorConnector: an observation is {shown(observation)}, expected one in {space}"
            ) from error


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

    def to_state(self) -> tuple[str, Any]:
        return "ClipRewardAgentConnector", {"sign": self.sign, "limit": self.limit}


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

    to_state = without_params


class ViewRequirementAgentConnector(AgentConnector):
    """Makes the policy's input, any[1, ...] each: `AgentConnectorsOutput`.

        obs                the newest observation, `new_obs`
        state_in_0, …      of a recurrent policy: what `StateBufferConnector` has added as `state_out_0` and so on

    Raises ConnectorError for data without one of those.
    """

    def transform(self, ac_data: AgentConnectorDataType) -> AgentConnectorDataType:
        data, env_id, agent_id = columns_of(self, ac_data), ac_data.env_id, ac_data.agent_id
        states = {f"state_in_{i}": f"state_out_{i}" for i in range(len(self.context.initial_states))}
        sources = {SampleBatch.OBS: SampleBatch.NEXT_OBS, **states}
        if missing := [source for source in sources.values() if source not in data]:
            remedy = "one" if missing[0] == SampleBatch.NEXT_OBS else "StateBufferConnector before it"
            raise ConnectorError(
                f"ViewRequirementAgentConnector: the data of agent {agent_id!r} of environment {env_id!r} have no "
                f"'{missing[0]}', expected {remedy}; columns: {', '.join(map(str, data)) or 'none'}"
            )
        batch = SampleBatch(
            {name: map_tree(lambda leaf: _array_of(leaf)[None], data[source]) for name, source in sources.items()}
        )
        for_training = data if self._is_training else {}
        return AgentConnectorDataType(env_id, agent_id, AgentConnectorsOutput(data, batch, for_training))

    to_state = without_params


def _array_of(leaf: Any) -> Any:
    return np.float32(leaf) if isinstance(leaf, float) else np.asarray(leaf)


class ConvertToNumpyConnector(ActionConnector):
    """Turns tensors among actions and states into arrays; fetches stay as they are."""

    def transform(self, ac_data: ActionConnectorDataType) -> ActionConnectorDataType:
        actions, states, fetches = ac_data.output
        output = (map_tree(array_of, actions), [map_tree(array_of, state) for state in states], fetches)
        return replace(ac_data, output=output)

    to_state = without_params


class _BoundedActions(ActionConnector):
    """Brings actions into the bounds of the context's action space, with the piece that rollouts use."""

    normalize_actions = False
    _piece: NormalizeAndClipActions | None = None

    def transform(self, ac_data: ActionConnectorDataType) -> ActionConnectorDataType:
        if self._piece is None:
            space, normalizes = self.context.action_space, self.normalize_actions
            if space is None:
                raise ConnectorError(
                    f"{type(self).__name__}: the context has no action_space, expected ConnectorContext(action_space=…)"
                )
            self._piece = NormalizeAndClipActions(
                None, space, normalize_actions=normalizes, clip_actions=not normalizes
            )
        batch = self._piece(batch={Columns.ACTIONS: [ac_data.output[0]]})
        return replace(ac_data, output=(batch[Columns.ACTIONS_FOR_ENV][0], *ac_data.output[1:]))

    def action_space_after(self, action_space: Space) -> Space:
        return action_space

    to_state = without_params


class NormalizeActionsConnector(_BoundedActions):
    """Scales actions from -1 … 1 to low … high of Boxes that are bounded on all sides."""

    normalize_actions = True


class ClipActionsConnector(_BoundedActions):
    """Clips actions to the bounds that Boxes have."""


class ImmutableActionsConnector(ActionConnector):
    """Makes actions read-only: arrays, and dicts of them; so nobody changes what has been recorded."""

    def transform(self, ac_data: ActionConnectorDataType) -> ActionConnectorDataType:
        return replace(ac_data, output=(_read_only(ac_data.output[0]), *ac_data.output[1:]))

    def action_space_after(self, action_space: Space) -> Space:
        return action_space

    to_state = without_params


def _read_only(actions: Tree) -> Any:
    if isinstance(actions, np.ndarray):
        view = actions.view()
        view.flags.writeable = False
        return view
    if isinstance(actions, dict):
        return types.MappingProxyType({key: _read_only(part) for key, part in actions.items()})
    if isinstance(actions, list | tuple):
        return tuple(map(_read_only, actions))
    return actions
