"""Minibatches of a train batch."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from rollflow.nodes.argument_checks import check_flags, checked_count
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ColumnError
from rollflow.stream.data.tree import leaves_of, map_tree


def minibatches(
    batch: Mapping[str, Any],
    size: int,
    *,
    shuffle: bool = True,
    drop_last: bool = False,
    generator: torch.Generator | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield parts of a train batch with `size` rows each, which together have each row once.

        batch        column -> a tree of tensors or arrays any[B, ...], or a list of B items; `obs` among them
        size         rows of a part, from 1 on; a row of a stateful module's batch is a sequence with its `state_in`
        shuffle      True: the rows in a random order; False: in the batch's own
        drop_last    True: leave out the last part if it has fewer rows; False: yield it
        generator    of the order; None: torch's own, which `torch.manual_seed` seeds

    Of several agents, call it for the batch of each module. Raises ValueError for a size below 1, and ColumnError for
    a batch without `obs`, or with a column that has another number of rows.
    """
    check_flags(shuffle=shuffle, drop_last=drop_last)
    size = checked_count("size", size, 1)
    count = _num_rows(batch)
    if shuffle:
        rows = torch.randperm(count, generator=generator, device=generator.device if generator else None).cpu()
    else:
        rows = torch.arange(count)
    return (
        {name: _rows_of(column, part) for name, column in batch.items()}
        for part in torch.split(rows, size)
        if len(part) == size or not drop_last
    )


def _num_rows(batch: Mapping[str, Any]) -> int:
    """The number of rows of every column."""
    if Columns.OBS not in batch:
        hint = ""
        if batch and all(isinstance(each, Mapping) and Columns.OBS in each for each in batch.values()):
            hint = "; it has a batch for each module: call minibatches for each of these"
        raise ColumnError(f"the batch has columns {list(map(str, batch))}, expected '{Columns.OBS}' among them{hint}")
    count = len(leaves_of(batch[Columns.OBS])[0])
    for name, column in batch.items():
        for leaf in [column] if isinstance(column, list) else leaves_of(column):
            if len(leaf) != count:
                raise ColumnError(
                    f"column '{name}' has {len(leaf)} rows, expected {count}, as '{Columns.OBS}' has: take it out of "
                    "the batch, or give each row its part of it"
                )
    return count


def _rows_of(column: Any, rows: torch.Tensor) -> Any:
    """Some rows, i64[n], of a column."""
    if isinstance(column, list):
        return [column[row] for row in rows.tolist()]
    return map_tree(lambda leaf: leaf[rows if torch.is_tensor(leaf) else rows.numpy()], column)
