"""Items by episode become rows in the environments' order."""

from typing import Any

from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes, episode_key
from rollflow.stream.columns import Columns
from rollflow.stream.errors import ConnectorError
from rollflow.stream.tree import stack_trees


class ListifyDataForVectorEnv(ConnectorV2):
    """Turns `(episode id,) -> [item]` into lists with one item per slot, and actions into arrays `any[N, ...]`.

    Columns that are arrays already, one row per slot, stay as they are. Raises ConnectorError for items of an episode
    that is none of those given, and for an episode without its one item.
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
        for column, data in batch.items():
            if not isinstance(data, dict) or not data or not all(isinstance(key, tuple) for key in data):
                continue
            keys = [episode_key(episode) for episode in episodes]
            if data.keys() != set(keys) or any(len(items) != 1 for items in data.values()):
                raise ConnectorError(
                    f"column '{column}' has {sum(map(len, data.values()))} items for episodes {list(data)}, expected "
                    f"one for each of {keys}"
                )
            items = [data[key][0] for key in keys]
            is_action = column in (Columns.ACTIONS, Columns.ACTIONS_FOR_ENV)
            batch[column] = stack_trees(items) if is_action else items
        return batch
