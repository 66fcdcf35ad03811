"""Train batches and weights of several modules, as they go to a trainer and back.

A batch is module id -> train batch. Weights go as those of one module do, by names `module id/name`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ModuleError
from rollflow.stream.data.tree import leaves_of, map_tree

Batch = dict[str, Any]
ByModule = Mapping[str, Mapping[str, Any]]


def is_by_module(tree: Any) -> bool:
    """True if weights, or a train batch, are those of several modules."""
    return isinstance(tree, Mapping) and bool(tree) and all(isinstance(each, Mapping) for each in tree.values())


def joined_weights(weights: ByModule) -> dict[str, Any]:
    """Join the weights of several modules under names `module id/name`."""
    return {f"{module_id}/{name}": value for module_id, each in weights.items() for name, value in each.items()}


def own_shapes(module: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of a module's weights, or of several modules' by their ids; none where they are not known."""
    if isinstance(module, Mapping):
        parts = {module_id: own_shapes(each) for module_id, each in module.items()}
        return joined_weights(parts) if all(parts.values()) else {}
    if not isinstance(module, torch.nn.Module):
        return {}
    named = [*module.named_parameters(), *module.named_buffers()]
    return {} if any(map(is_lazy, (tensor for _, tensor in named))) else {name: tuple(it.shape) for name, it in named}


def parted_weights(weights: Mapping[str, Any], ids: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Part joined weights by modules with these ids. Raises ModuleError for a name of another module."""
    parted: dict[str, dict[str, Any]] = {}
    longest_first = sorted(ids, key=len, reverse=True)
    for joined, value in weights.items():
        module_id = next((each for each in longest_first if joined.startswith(f"{each}/")), None)
        if module_id is None:
            raise ModuleError(f"weights have '{joined}', expected 'module id/name' with ids among {sorted(ids)}")
        parted.setdefault(module_id, {})[joined[len(module_id) + 1 :]] = value
    return parted


def batches_in(batch: Batch, *, is_by_module: bool) -> Iterator[Batch]:
    """The train batches that a batch is made of."""
    if is_by_module:
        yield from batch.values()
    else:
        yield batch


def oldest_version(batches: Iterable[Batch]) -> int | None:
    """The oldest policy version that actions were computed with; None where a batch does not say, or has no steps."""
    oldest = []
    for batch in batches:
        versions, mask = batch.get(Columns.POLICY_VERSION), batch.get(Columns.LOSS_MASK)
        if versions is None:
            return None
        if mask is not None and mask.shape == versions.shape:
            versions = versions[mask]  # without what rows are padded with
        if not len(versions):
            return None
        oldest.append(int(versions.min()))
    return min(oldest, default=None)


def newest_version(batches: Iterable[Batch]) -> int | None:
    """The newest policy version that actions were computed with; None where no batch says."""
    versions = [each[Columns.POLICY_VERSION] for each in batches if Columns.POLICY_VERSION in each]
    return max((int(each.max()) for each in versions if len(each)), default=None)


def num_steps(batches: Iterable[Batch]) -> int:
    """Steps in all of them: rows, or what the loss masks have of them."""
    count = 0
    for batch in batches:
        mask = batch.get(Columns.LOSS_MASK)
        count += len(leaves_of(batch)[0]) if mask is None else int(mask.sum())
    return count


def concatenated(batches: Sequence[Batch], *, is_by_module: bool) -> Batch:
    """Several as one; of several modules, each module's, of which some batches may have none."""
    if is_by_module:
        ids = dict.fromkeys(module_id for batch in batches for module_id in batch)
        return {module_id: _one_of([batch[module_id] for batch in batches if module_id in batch]) for module_id in ids}
    return _one_of(batches)


def _one_of(batches: Sequence[Batch]) -> Batch:
    """With the columns that all have: a module may have been followed by another that gives others."""
    if len(batches) == 1:
        return dict(batches[0])
    names = [name for name in batches[0] if all(name in batch for batch in batches)]
    return {name: map_tree(lambda *parts: torch.cat(parts), *(each[name] for each in batches)) for name in names}
