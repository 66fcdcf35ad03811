"""Trees of arrays, the items of Dict and Tuple spaces, and functions over their leaves.

A *tree* is an array (or any plain value), or a dict, tuple or list of trees. optree does the walking; here `None`
is always a leaf.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import optree

from rollflow.stream.data.errors import ModuleError

Tree = Any


def library_of(leaf: Any) -> Any:
    """The library that a leaf any[...] is of: torch for a tensor, else numpy."""
    torch = None if isinstance(leaf, np.ndarray) else sys.modules.get("torch")  # which this layer does not import
    return torch if torch is not None and torch.is_tensor(leaf) else np


def map_tree(function: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """The tree of `function(leaf, ...)` over the leaves any[...] of one tree, or of several of one structure."""
    if not rest and isinstance(tree, np.ndarray):
        return function(tree)
    return optree.tree_map(function, tree, *rest, none_is_leaf=True)


def leaves_of(tree: Tree) -> list[Any]:
    """The leaves any[...], in an order that is the same for every tree of one structure."""
    if isinstance(tree, np.ndarray):
        return [tree]
    return optree.tree_leaves(tree, none_is_leaf=True)


def stack_trees(items: Sequence[Tree]) -> Tree:
    """One tree from items of one structure: a leaf `any[...]` becomes `any[len(items), ...]`."""
    first = items[0]
    if isinstance(first, (dict, tuple, list)):
        return optree.tree_map(lambda *leaves: np.stack(leaves), *items, none_is_leaf=True)
    return np.stack(items)


def structure_of(tree: Tree) -> optree.PyTreeSpec:
    """The structure of a tree, for `stack_in`."""
    return optree.tree_structure(tree, none_is_leaf=True)


def stack_in(structure: optree.PyTreeSpec, items: Sequence[Tree]) -> Tree:
    """`stack_trees` for items of `structure` whose leaves may be lists.

    Raises ValueError for another structure, and TypeError for leaves that are no numbers.
    """
    leaves = zip(*[structure.flatten_up_to(item) for item in items], strict=True)
    arrays = [np.array(leaf) for leaf in leaves]
    for array in arrays:
        if array.dtype.kind not in "biufc":
            raise TypeError(f"leaves of dtype {array.dtype}, expected numbers")
    return structure.unflatten(arrays)


def concatenate_trees(trees: Sequence[Tree]) -> Tree:
    """One tree from trees of arrays, or of tensors, `any[n, ...]`, joined along the first axis."""
    if len(trees) == 1:
        return trees[0]
    return map_tree(lambda *leaves: library_of(leaves[0]).concatenate(leaves), *trees)


def kind_of(tree: Tree) -> Tree:
    """The tree of (dtype, shape behind the first axis) of a tree of arrays `any[N, ...]`, for comparisons."""
    return map_tree(lambda leaf: (leaf.dtype, leaf.shape[1:]), tree)


def tree_at(tree: Tree, where: Any) -> Tree:
    """The tree of `leaf[where]` over leaves any[...]; arrays and dicts are handled without optree's overhead."""
    if isinstance(tree, np.ndarray):
        return tree[where]
    if type(tree) is dict:
        return {key: tree_at(part, where) for key, part in tree.items()}
    return map_tree(lambda leaf: leaf[where], tree)


def part_at(tree: Tree, path: Sequence[Any], name: str, expected: str) -> Tree:
    """The part of a tree under these keys. Raises ModuleError, with the tree's name, if there is none."""
    part = tree
    for key in path:
        try:
            part = part[key]
        except (IndexError, KeyError, TypeError):
            raise ModuleError(f"{name} has nothing at {list(path)}, expected {expected}") from None
    return part


def with_tuples(tree: Tree) -> Tree:
    """A tree with a tuple for each list, which messages have for them."""
    if isinstance(tree, dict):
        return {key: with_tuples(part) for key, part in tree.items()}
    return tuple(map(with_tuples, tree)) if isinstance(tree, list | tuple) else tree


def unstack_tree(tree: Tree) -> list[Tree]:
    """The rows of a tree of arrays `any[N, ...]`: N trees of arrays `any[...]`."""
    return [tree_at(tree, row) for row in range(len(leaves_of(tree)[0]))]


def equal_trees(left: Any, right: Any) -> bool:
    """True if two trees have the same structure and values. NaN equals NaN; an array equals a list of its values."""
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return _equal_leaves(left, right)
    ours, our_structure = optree.tree_flatten(left, none_is_leaf=True)
    theirs, their_structure = optree.tree_flatten(right, none_is_leaf=True)
    return our_structure == their_structure and all(map(_equal_leaves, ours, theirs))


def _equal_leaves(left: Any, right: Any) -> bool:
    if left is right:
        return True
    try:
        ours, theirs = np.asarray(left), np.asarray(right)
    except ValueError:  # a ragged list beside an array
        return False
    may_be_nan = ours.dtype.kind in "fc" and theirs.dtype.kind in "fc"
    return bool(np.array_equal(ours, theirs, equal_nan=may_be_nan))
