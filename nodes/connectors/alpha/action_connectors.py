"""Action connectors: arrays of tensors, bounds, and read-only actions."""

import types
from typing import Any

import numpy as np

from rollflow.nodes.connectors.alpha.connector import (
    ActionConnector,
    ActionConnectorDataType,
    array_of,
    without_params,
)
from rollflow.nodes.connectors.module_to_env.normalize_and_clip_actions import NormalizeAndClipActions
from rollflow.nodes.connectors.spaces import Space
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ConnectorError
from rollflow.stream.data.tree import Tree, map_tree


def with_actions(ac_data: ActionConnectorDataType, actions: Any) -> ActionConnectorDataType:
    """Copy of an output with other actions."""
    _, states, fetches = ac_data.output
    return ActionConnectorDataType(ac_data.env_id, ac_data.agent_id, ac_data.input_dict, (actions, states, fetches))


class ConvertToNumpyConnector(ActionConnector):
    """Turns tensors among actions and states into arrays; fetches stay as they are."""

    def transform(self, ac_data: ActionConnectorDataType) -> ActionConnectorDataType:
        actions, states, fetches = ac_data.output
        output = (map_tree(array_of, actions), [map_tree(array_of, state) for state in states], fetches)
        return ActionConnectorDataType(ac_data.env_id, ac_data.agent_id, ac_data.input_dict, output)

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
        return with_actions(ac_data, batch[Columns.ACTIONS_FOR_ENV][0])

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
        return with_actions(ac_data, _read_only(ac_data.output[0]))

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
