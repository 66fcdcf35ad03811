"""Fragments that came as one, since they differ in their numbers and their arrays' values alone."""

from typing import Any

import numpy as np
import optree
from numpy.typing import NDArray

from rollflow.stream.errors import WireError
from rollflow.stream.wire.lent_columns import lent_columns
from rollflow.stream.wire.limits import MAX_VALUES
from rollflow.stream.wire.running import Fragment, Series


def series_parts(series: Series, blocks: list[NDArray[np.uint8]]) -> list[Fragment]:
    """Each fragment, its arrays where they lie. Raises WireError where they lie nowhere, or in those of others."""
    leaves, spec = lent_columns(series.columns)
    count, stride = series.count, series.stride
    size = sum([leaf.nbytes for leaf in leaves])
    if stride % 8 or stride < size:
        raise WireError(f"series: stride {stride}, expected a multiple of 8 of at least {size} bytes", "memory")
    if count * spec.num_nodes > MAX_VALUES:
        raise WireError(f"series: {count} trees of {spec.num_nodes} nodes, expected at most {MAX_VALUES}", "memory")
    columns = [leaf.arrays(blocks, count, stride) for leaf in leaves]
    trees: list[Any] = [optree.tree_unflatten(spec, [column[i] for column in columns]) for i in range(count)]
    return [Fragment(series.lane, series.number + i, tree, series.rest) for i, tree in enumerate(trees)]
