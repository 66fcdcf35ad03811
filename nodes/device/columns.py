"""Columns of tensors on one device, and what makes those of a lane's fragments."""

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from rollflow.stream.data.column import Column
from rollflow.stream.data.columns import ONE_EACH, Columns
from rollflow.stream.data.errors import ColumnError, more_than_one, shown
from rollflow.stream.data.space import row_of
from rollflow.stream.data.tree import Tree, leaves_of, map_tree
from rollflow.stream.fragments.fragment import FragmentLayout
from rollflow.stream.fragments.lane import LaneColumns


class DeviceColumn(Column):
    """A tree of tensors `any[rows, N, ...]` on one device: time first, then the N slots of a lane.

    What is written lies on that device already. Nothing is read from it: whole numbers are not held against the range
    of the column's dtype.
    """

    __slots__ = ("kind",)

    _array: Any
    _leaves: list[Any]

    def __init__(self, name: str, tree: Tree) -> None:
        super().__init__(name, tree)
        self.kind: Any = None, None, None  # dtype, shape and device of a row of one tensor, written without a look
        if torch.is_tensor(tree):
            self._array, self.kind = tree, (tree.dtype, self._shape, tree.device)

    def write(self, row: int, values: Tree) -> None:
        """Copy `values`, a tree of tensors `any[N, ...]`, into row `row`.

        Raises ColumnError when the structure, a shape, the kind of a dtype, or the device differs.
        """
        for leaf, part in zip(self._leaves, self._matched(values, self._shape[:1]), strict=True):
            leaf[row].copy_(part)

    def cast(self, items: Tree, count: int) -> Tree:
        """`items`, a tree of tensors `any[count, ...]`, in this column's dtypes. Raises ColumnError as `write` does."""
        leaves = zip(self._leaves, self._matched(items, (count,)), strict=True)
        return self._treespec.unflatten([part.to(leaf.dtype) for leaf, part in leaves])

    def whole(self, values: Tree) -> Tree:
        """`values`: floats are not looked at."""
        return values

    def seal(self) -> None:
        """Forget the views: tensors can't be made read-only."""
        self.views = None

    def _matched(self, values: Tree, leading: tuple[int, ...]) -> list[Any]:
        problem = self._mismatch(values, leading)
        if problem is not None:
            raise ColumnError(problem)
        return self._treespec.flatten_up_to(values)

    def _mismatch(self, values: Tree, leading: tuple[int, ...]) -> str | None:
        try:
            parts = self._treespec.flatten_up_to(values)
        except ValueError:
            return super()._mismatch(values, leading)
        part: Any
        for place, (leaf, part) in enumerate(zip(self._leaves, parts, strict=True)):
            shape, there = (*leading, *leaf.shape[2:]), torch.is_tensor(part)
            if there and part.device == leaf.device and part.shape == shape and torch.can_cast(part.dtype, leaf.dtype):
                continue
            path = self._treespec.accessors()[place]
            where = path.codify("") if len(path) else ""
            got = f"{_kind(part)}{list(part.shape)} on {part.device}" if there else shown(part)
            return f"column '{self.name}'{where}: got {got}, expected {_kind(leaf)}{list(shape)} on {leaf.device}"
        return None


def write_tensors(columns: Mapping[str, Any], row: int, values: Mapping[str, Tree]) -> None:
    """Copy values, name -> tree of tensors `any[N, ...]`, into row `row` of the device's columns of these names.

    Raises ColumnError as `DeviceColumn.write` does, and KeyError for a name of no column.
    """
    for name, value in values.items():
        column = columns[name]
        if type(value) is torch.Tensor and (value.dtype, value.shape, value.device) == column.kind:
            column.tree[row] = value  # without a call for each column
        else:
            column.write(row, value)


def on_device(tree: Tree, device: torch.device) -> Tree:
    """The tree with its tensors on a device; other leaves are as they are."""
    return map_tree(lambda leaf: leaf.to(device) if torch.is_tensor(leaf) else leaf, tree)


def _kind(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


class DeviceColumns(LaneColumns):
    """Makes the columns of one fragment after the other, on a device, whose allocator reuses their memory."""

    def __init__(self, layout: FragmentLayout, device: torch.device) -> None:
        super().__init__(layout, None)
        self.device = device

    def extra(self, name: str, values: Tree) -> Column:
        """A new column for an output with `values`, a tree of tensors `any[N, ...]`. Raises ColumnError for others."""
        slots = self._layout.num_slots
        for leaf in leaves_of(values):
            if not torch.is_tensor(leaf) or leaf.shape[:1] != (slots,):
                given = f"{_kind(leaf)}{list(leaf.shape)}" if torch.is_tensor(leaf) else shown(leaf)
                raise ColumnError(
                    f"output '{name}' is {given}, expected a tensor with a leading axis of {slots}, one row per slot"
                ).see("module")
            if name in ONE_EACH and leaf.ndim > 1:
                raise ColumnError(more_than_one(name, tuple(leaf.shape), (slots,))).see("module")
        return self._empty(name, values, self._rows)

    @torch.inference_mode(False)  # whose tensors could not be written to outside of it
    def like(self, old: Mapping[str, Column], *, are_written: bool) -> dict[str, Column]:
        """The columns of the next fragment, with the types of the last one's."""
        return {name: DeviceColumn(name, map_tree(torch.empty_like, column.tree)) for name, column in old.items()}

    def actions(self, space: gym.Space[Any]) -> DeviceColumn:
        """A column for actions in a space that has no rows, to convert others by."""
        return self._empty(Columns.ACTIONS, row_of(space, self._layout.num_slots), 0)

    @torch.inference_mode(False)
    def _empty(self, name: str, row: Tree, rows: int) -> DeviceColumn:
        def zeros(leaf: Any) -> torch.Tensor:
            dtype = leaf.dtype if torch.is_tensor(leaf) else torch.from_numpy(np.empty(0, leaf.dtype)).dtype
            return torch.zeros((rows, *leaf.shape), dtype=dtype, device=self.device)

        return DeviceColumn(name, map_tree(zeros, row))
