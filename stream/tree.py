"""Nested structures of arrays: what a Dict or Tuple space holds, leaf by leaf.

A *tree* is an array (or any plain value), or a dict, tuple or list of trees. The walking is optree's; this
file fixes its one choice for all of rollflow: `None` is a leaf.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import optree

Tree = Any


def map_tree(function: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """The tree of `function(leaf, ...)`, over one tree or several of one structure."""
    if not rest and isinstance(tree, np.ndarray):
        return function(tree)
    return optree.tree_map(function, tree, *rest, none_is_leaf=True)


def leaves_of(tree: Tree) -> list[Any]:
    """The leaves, in an order that is the same for every tree of one structure."""
    if isinstance(tree, np.ndarray):
        return [tree]
    return optree.tree_leaves(tree, none_is_leaf=True)


def stack_trees(items: Sequence[Tree]) -> Tree:
    """One tree from items of one structure: a leaf `any[...]` becomes `any[len(items), ...]`."""
    first = items[0]
    if isinstance(first, (dict, tuple, list)):
        return optree.tree_map(lambda *leaves: np.stack(leaves), *items, none_is_leaf=True)
    return np.stack(items)


def concatenate_trees(trees: Sequence[Tree]) -> Tree:
    """One tree from trees that each have a leading axis, end to end."""
    if len(trees) == 1:
        return trees[0]
    return map_tree(lambda *leaves: np.concatenate(leaves), *trees)


def kind_of(tree: Tree) -> Tree:
    """Structure, dtypes and shapes behind the leading axis of a tree of arrays `any[N, ...]`, to be compared."""
    return map_tree(lambda leaf: (leaf.dtype, leaf.shape[1:]), tree)
