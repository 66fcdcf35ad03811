"""From modules back to agents."""

from typing import Any

from rollflow.nodes.connectors.agents import is_keyed_by_episode
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes
from rollflow.stream.errors import ConnectorError


class ModuleToAgentUnmapping(ConnectorV2):
    """Turns `module id -> column -> (episode id, agent id, module id) -> items` into `column -> keys -> items`.

    Items of one key under several modules come one after the other. Raises ConnectorError for a batch that is not by
    module ids and episodes.
    """

    columnar = False
    changes_episodes = False

    def __call__(
        self,
        *,
        rl_module: Any,
        batch: Batch,
        episodes: Episodes,
        explore: bool | None = None,
        shared_data: dict[str, Any] | None = None,
        metrics: Any = None,
        **kwargs: Any,
    ) -> Batch:
        unmapped: Batch = {}
        for module, columns in batch.items():
            if not isinstance(columns, dict):
                raise ConnectorError(f"'{module}' is {type(columns).__name__}, expected a module's columns, a dict")
            for column, data in columns.items():
                if not is_keyed_by_episode(data):
                    raise ConnectorError(
                        f"column '{column}' of module '{module}' is {type(data).__name__}, expected a dict from "
                        "episodes to lists of items: ModuleToAgentUnmapping stands behind UnBatchToIndividualItems"
                    )
                for key, items in data.items():
                    unmapped.setdefault(column, {}).setdefault(key, []).extend(items)
        return unmapped
