"""Arrays become items one by one."""

from typing import Any

import numpy as np

from rollflow.nodes.connectors.agents import episode_key, single_agent_episodes
from rollflow.nodes.connectors.common.agent_to_module_mapping import MEMORIZED
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes
from rollflow.stream.errors import ConnectorError
from rollflow.stream.live_episode import LaneEpisodes
from rollflow.stream.tree import Tree, leaves_of, map_tree


class UnBatchToIndividualItems(ConnectorV2):
    """Turns trees of arrays `any[N, ...]` into `(episode id,) -> [item]`, in the episodes' order.

    A batch by module ids becomes `module id -> column -> (episode id, agent id, module id) -> [item]`, by what
    `AgentToModuleMapping` kept in `shared_data`. Where all pieces after it work with columns there is nothing to turn,
    and the arrays stay. Raises ConnectorError where a column does not have one row per episode.
    """

    columnar = True
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
        memorized = (shared_data or {}).get(MEMORIZED)
        if memorized is not None and batch.keys() <= memorized.keys():  # by module ids
            for module, columns in batch.items():
                keys = [
                    (episode_id,) if agent_id is None else (episode_id, agent_id, module)
                    for episode_id, agent_id in memorized[module]
                ]
                batch[module] = {column: _unbatched(column, data, keys) for column, data in columns.items()}
            return batch
        if isinstance(episodes, LaneEpisodes):
            return batch
        keys = [episode_key(episode) for episode in single_agent_episodes(episodes, stepped_only=True)]
        for column, data in batch.items():
            batch[column] = _unbatched(column, data, keys)
        return batch


def _unbatched(column: str, data: Tree, keys: list[tuple[Any, ...]]) -> dict[tuple[Any, ...], list[Any]]:
    for leaf in leaves_of(data):
        if np.shape(leaf)[:1] != (len(keys),):
            raise ConnectorError(
                f"column '{column}' has an array of shape {list(np.shape(leaf))}, expected {len(keys)} rows: "
                "one per episode"
            )
    return {key: [map_tree(lambda leaf, i=i: leaf[i], data)] for i, key in enumerate(keys)}
