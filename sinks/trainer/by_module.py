"""Train batches and weights of several modules, as they go to a trainer and back.

A batch is module id -> train batch. Weights go as those of one module do, by names `module id/name`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from rollflow.stream.columns import Columns
from rollflow.stream.errors import ModuleError
from rollflow.stream.tree import leaves_of, map_tree

Batch = dict[str, Any]
ByModule = Mapping[str, Mapping[str, Any]]


def is_by_module(tree: Any) -> bool:
    """Whether weights, or a train batch, are those of several modules."""
    return isinstance(tree, Mapping) and bool(tree) and all(isinstance(each, Mapping) for each in tree.values())


def joined_weights(weights: ByModule) -> dict[str, Any]:
    """Those of several modules as those of one."""
    return {f"{module_id}/{name}": value for module_id, each in weights.items() for name, value in each.items()}


def parted_weights(weights: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The same by modules again. Raises ModuleError for a name that is of none."""
    parted: dict[str, dict[str, Any]] = {}
    for joined, value in weights.items():
        module_id, slash, name = joined.rpartition("/")
        if not slash:
            raise ModuleError(f"weights have '{joined}', expected 'module id/name' where there are several modules")
        parted.setdefault(module_id, {})[name] = value
    return parted


def batches_in(batch: Batch, *, is_by_module: bool) -> Iterator[Batch]:
    """The train batches that a batch is made of."""
    if is_by_module:
        yield from batch.values()
    else:
        yield batch


def oldest_version(batches: Iterator[Batch]) -> int | None:
    """The oldest policy version that actions were computed with; None where a batch does not say, or has no rows."""
    oldest = []
    for batch in batches:
        versions = batch.get(Columns.POLICY_VERSION)
        if versions is None or not len(versions):
            return None
        oldest.append(int(versions.min()))
    return min(oldest, default=None)


def num_rows(batches: Iterator[Batch]) -> int:
    """Rows of all of them."""
    return sum(len(leaves_of(batch)[0]) for batch in batches)


def concatenated(batches: Sequence[Batch], *, is_by_module: bool) -> Batch:
    """Several as one; of several modules, each module's, of which some batches may have none."""
    if is_by_module:
        ids = dict.fromkeys(module_id for batch in batches for module_id in batch)
        return {module_id: _one_of([batch[module_id] for batch in batches if module_id in batch]) for module_id in ids}
    return _one_of(batches)


def _one_of(batches: Sequence[Batch]) -> Batch:
    if len(batches) == 1:
        return dict(batches[0])
    return {name: map_tree(lambda *parts: torch.cat(parts), *(each[name] for each in batches)) for name in batches[0]}
