"""Pieces that make a policy's observations of another environment's, and that environment's actions of the policy's."""

from collections.abc import Mapping
from typing import Any

from rollflow.nodes.connectors.adapting.field_map import FieldMap, Origin
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Space
from rollflow.nodes.connectors.env_to_module.observation_preprocessor import ObservationRewriter
from rollflow.nodes.connectors.list_form import map_column
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.tree import Tree


class _AdaptingPiece(ConnectorV2):
    """Base of pieces that leave another space, made of fields: see `AdaptObservations`."""

    def __init__(
        self,
        input_observation_space: Space | None = None,
        input_action_space: Space | None = None,
        *,
        space: Space,
        fields: Mapping[str, Origin],
    ) -> None:
        super().__init__(input_observation_space, input_action_space)
        self.space, self.fields = space, dict(fields)


class AdaptObservations(_AdaptingPiece, ObservationRewriter):
    """Rewrites every episode's last observation as one of another space, made of its fields.

        space     of the observations that it leaves
        fields    path of a field -> where it comes from: the path of a field of the observation, such as
                  `observation[2]` or `observation['speed']`; `[path, factor, offset]`; or a number to fill it with

    `Policy.adapted` finds the fields of two spaces. Raises ConnectorError for a field that is missing or unknown.
    """

    columnar = True
    pipelines = ("env-to-module",)

    def recompute_output_observation_space(self, input_observation_space: Space, input_action_space: Space) -> Space:
        self.map = FieldMap("observation", input_observation_space, self.space, self.fields)
        return self.space

    def rewritten(self, observations: Tree, agent_id: Any = None) -> Tree:
        self._needed_space("observation")
        return self.map(observations)


class AdaptActions(_AdaptingPiece):
    """Rewrites `actions_for_env` as actions of another space, made of their fields; `actions` stay as chosen.

        space     of the actions that the environments get
        fields    as for `AdaptObservations`, with paths such as `action[0]`

    It stands behind the piece that brings actions into the policy's bounds, and brings them into those of its space.
    Raises ConnectorError likewise.
    """

    columnar = True
    pipelines = ("module-to-env",)
    changes_episodes = False

    def recompute_output_action_space(self, input_observation_space: Space, input_action_space: Space) -> Space:
        self.map = FieldMap("action", input_action_space, self.space, self.fields, clips=True)
        return self.space

    def __call__(self, *, batch: Batch, **kwargs: Any) -> Batch:
        self._know_spaces()
        self._needed_space("action")
        chosen = batch.get(Columns.ACTIONS_FOR_ENV, batch.get(Columns.ACTIONS))
        if chosen is not None:
            batch[Columns.ACTIONS_FOR_ENV] = map_column(chosen, self.map, self.map)
        return batch
