"""Items of one space made of items of another one, field by field."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rollflow.nodes.connectors.adapting.fields import Leaf, leaves_within, numbers_within
from rollflow.nodes.connectors.spaces import Space
from rollflow.stream.data.errors import ConnectorError
from rollflow.stream.data.space import items_in, nearest
from rollflow.stream.data.tree import Tree

Origin = float | str | list[Any]
"""Where a field comes from: a number to fill it with, the path of a field, or [path, factor, offset]."""


@dataclass(frozen=True, slots=True)
class LeafRule:
    """How one leaf is made.

    target            the leaf
    sources           leaves whose D numbers are joined end to end
    index             i64[size], into the joined numbers; None: all of them, in order
    scale             (factor, offset), f64[size] or f64[] each; None: the numbers stay
    filled            bool[size], true for numbers that are constants; None: there are none
    constants         f64[size]
    bounds            (low, high) that the numbers are brought into, f64[2, size]; None: into none
    """

    target: Leaf
    sources: tuple[Leaf, ...]
    index: NDArray[np.int64] | None
    scale: tuple[NDArray[np.float64], NDArray[np.float64]] | None
    filled: NDArray[np.bool_] | None
    constants: NDArray[np.float64]
    bounds: NDArray[np.float64] | None

    @property
    def rounds(self) -> bool:
        """True if the leaf is of whole numbers."""
        return np.dtype(self.target.space.dtype).kind not in "f"

    def made(self, items: Tree, lead: tuple[int, ...]) -> NDArray[Any]:
        """The leaf's array any[*lead, *shape] for items of the other space."""
        parts = [np.asarray(leaf.found(items)).reshape(*lead, leaf.size) for leaf in self.sources]
        rows = np.concatenate(parts, axis=-1) if parts else np.zeros((*lead, self.target.size))
        if self.index is not None and parts:
            rows = rows[..., self.index]
        if self.scale is not None:
            rows = rows * self.scale[0] + self.scale[1]
        if self.filled is not None:
            rows = np.where(self.filled, self.constants, rows)
        if self.bounds is not None:
            rows = np.clip(rows, *self.bounds)
        rows, space = rows.reshape(*lead, *self.target.shape), self.target.space
        if self.rounds and isinstance(space, spaces.Box):
            made: NDArray[Any] = nearest(space, rows) if rows.dtype.kind == "f" else items_in(space, rows)
            return made
        if self.rounds and rows.dtype.kind == "f":
            rows = np.rint(rows)
        return rows.astype(space.dtype, copy=False)


class FieldMap:
    """Makes items of a space `target` of items of a space `source`.

        name      "observation" or "action", which paths begin with
        clips     True: numbers are brought into the target's bounds
        fields    path of a field of the target -> where it comes from; every leaf, or each number of it, has one

    `rules` has one for each leaf of the target. Floats are rounded where a field is of whole numbers. Raises
    ConnectorError for paths that are missing or unknown.
    """

    def __init__(
        self, name: str, source: Space, target: Space, fields: Mapping[str, Origin], *, clips: bool = False
    ) -> None:
        self._clips = clips
        self.target = target
        self._leaves = {leaf.path: leaf for leaf in leaves_within(source, name)}
        self._first = next(iter(self._leaves.values()))
        self._numbers = numbers_within(self._leaves.values())
        unused = dict(fields)
        self.rules = [self._rule(leaf, unused) for leaf in leaves_within(target, name)]
        if unused:
            raise ConnectorError(f"fields {sorted(unused)} are not in {target}, expected its fields alone")

    def __call__(self, items: Tree) -> Tree:
        """The items, a tree of arrays any[..., *shape], of items with the same leading axes."""
        array = np.asarray(self._first.found(items))
        lead = array.shape[: array.ndim - len(self._first.shape)]
        return assembled(self.target, iter([rule.made(items, lead) for rule in self.rules]))

    def _rule(self, target: Leaf, unused: dict[str, Origin]) -> LeafRule:
        if target.path in unused:
            return self._rule_of_leaf(target, unused.pop(target.path))
        missing = [path for path in target.numbers() if path not in unused] if target.is_vector else [target.path]
        if missing:
            raise ConnectorError(f"field {missing[0]} has no origin, expected one for every field of the space")
        origins = [_parts(unused.pop(path)) for path in target.numbers()]
        found = [None if path is None else self._number(path, target) for path, _, _ in origins]
        sources = tuple(dict.fromkeys(each[0] for each in found if each is not None))
        begins = dict(zip(sources, np.cumsum([0, *(leaf.size for leaf in sources)]).tolist(), strict=False))
        index = np.array([0 if each is None else begins[each[0]] + each[1] for each in found], np.int64)
        factor, offset = (np.array([each[place] for each in origins], np.float64) for place in (1, 2))
        filled = np.array([each is None for each in found])
        is_scaled = bool((factor[~filled] != 1.0).any() or (offset[~filled] != 0.0).any())
        return LeafRule(
            target,
            sources,
            index,
            (np.where(filled, 1.0, factor), np.where(filled, 0.0, offset)) if is_scaled else None,
            filled if filled.any() else None,
            offset,
            self._bounds(target),
        )

    def _rule_of_leaf(self, target: Leaf, origin: Origin) -> LeafRule:
        path, factor, offset = _parts(origin)
        if path is None:
            filled = np.ones(target.size, np.bool_)
            return LeafRule(target, (), None, None, filled, np.full(target.size, offset), None)
        leaf, place = self._leaves.get(path), None
        if leaf is None:
            leaf, place = self._number(path, target)
        if (leaf.size if place is None else 1) != target.size:
            raise ConnectorError(f"{path} has shape {list(leaf.shape)}, expected {list(target.shape)} of {target.path}")
        index = None if place is None else np.array([place])
        scale = (np.array(factor), np.array(offset)) if (factor, offset) != (1.0, 0.0) else None
        return LeafRule(target, (leaf,), index, scale, None, np.zeros(target.size), self._bounds(target))

    def _bounds(self, target: Leaf) -> NDArray[np.float64] | None:
        return target.bounds() if self._clips else None

    def _number(self, path: str, target: Leaf) -> tuple[Leaf, int]:
        if path not in self._numbers:
            raise ConnectorError(
                f"{target.path} comes from {path}, which is not there; expected one of {', '.join(self._numbers)}"
            )
        return self._numbers[path]


def assembled(space: Space, leaves: Iterator[Any]) -> Tree:
    """The tree of a space's leaves, which come in the order of `leaves_within`."""
    if isinstance(space, spaces.Dict):
        return {key: assembled(part, leaves) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(assembled(part, leaves) for part in space.spaces)
    return next(leaves)


def _parts(origin: Origin) -> tuple[str | None, float, float]:
    """(path, factor, offset) of an origin; without a path the offset is the value."""
    if isinstance(origin, str):
        return origin, 1.0, 0.0
    if isinstance(origin, list | tuple):
        path, factor, offset = origin
        return str(path), float(factor), float(offset)
    return None, 1.0, float(origin)
