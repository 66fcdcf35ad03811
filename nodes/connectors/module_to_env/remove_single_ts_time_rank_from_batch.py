"""The time axis of a stateful module's output taken away again."""

from typing import Any

from rollflow.nodes.connectors.agents import is_keyed_by_episode
from rollflow.nodes.connectors.by_module import module_by_module
from rollflow.nodes.connectors.common.add_time_dim_to_batch_and_zero_pad import TIME_RANK_ADDED
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes
from rollflow.stream.columns import Columns
from rollflow.stream.errors import ConnectorError
from rollflow.stream.tree import Tree, map_tree


class RemoveSingleTsTimeRankFromBatch(ConnectorV2):
    """Takes from every column but `state_out` the time axis that `AddTimeDimToBatchAndZeroPad` added before.

    An item `any[1, ...]` becomes `any[...]`. Does nothing unless that piece, by `shared_data`, says that it added one.
    Raises ConnectorError for a column that has no time axis of one step.
    """

    columnar = True
    changes_episodes = False

    @module_by_module
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
        if not shared_data or not shared_data.get(TIME_RANK_ADDED):
            return batch
        for column, data in batch.items():
            if column in (Columns.STATE_OUT, Columns.INFOS):
                continue
            if is_keyed_by_episode(data):
                batch[column] = {key: [_without(column, item, 0) for item in items] for key, items in data.items()}
            elif isinstance(data, list):
                batch[column] = [_without(column, item, 0) for item in data]
            else:
                batch[column] = _without(column, data, 1)
        return batch


def _without(column: str, data: Tree, axis: int) -> Tree:
    def taken(leaf: Any) -> Any:
        if leaf.ndim <= axis or leaf.shape[axis] != 1:
            expected = "[N, 1, ...]" if axis else "[1, ...]"
            raise ConnectorError(
                f"column '{column}' has shape {list(leaf.shape)}, expected {expected}: a stateful module's outputs "
                f"have a time axis, all but '{Columns.STATE_OUT}'"
            )
        return leaf[:, 0] if axis else leaf[0]

    return map_tree(taken, data)
