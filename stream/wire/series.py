"""Fragments that came as one, since they differ in numbers, lanes, their arrays' values and a little else alone."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import optree
from numpy.typing import NDArray

from rollflow.stream.errors import WireError
from rollflow.stream.wire.field import whole
from rollflow.stream.wire.handshake import MOST_NUMBER
from rollflow.stream.wire.lent_columns import lent_columns
from rollflow.stream.wire.limits import MAX_VALUES
from rollflow.stream.wire.running import Fragment, Series

EACH = "each"  # entry of `rest`: what each fragment has in its own, beside what all have
LANE = "lane"  # entry of one of `each`: the fragment's lane, where it is another than the series'
_check_lane = whole(0, MOST_NUMBER)


def series_parts(series: Series, blocks: list[NDArray[np.uint8]]) -> list[Fragment]:
    """Each fragment, its arrays where they lie. Raises WireError where they lie nowhere, or in those of others."""
    where = lent_columns(series.columns)
    leaves, spec, _ = where
    count, stride = series.count, series.stride
    size = sum([leaf.nbytes for leaf in leaves])
    is_apart = bool(series.blocks and size and not stride)
    if not is_apart and (stride % 8 or stride < size):
        raise WireError(f"series: stride {stride}, expected a multiple of 8 of at least {size} bytes", "memory")
    if count * spec.num_nodes > MAX_VALUES:
        raise WireError(f"series: {count} trees of {spec.num_nodes} nodes, expected at most {MAX_VALUES}", "memory")
    if is_apart:
        trees = [where.tree(own) for own in _blocks_of_each(blocks, count)]
    else:
        columns = [leaf.arrays(blocks, count, stride) for leaf in leaves]
        trees = [optree.tree_unflatten(spec, [column[i] for column in columns]) for i in range(count)]
    return [
        Fragment(lane, series.number + i, tree, rest)
        for i, (tree, (lane, rest)) in enumerate(zip(trees, _lanes_and_rests(series), strict=True))
    ]


def _blocks_of_each(blocks: list[NDArray[np.uint8]], count: int) -> list[list[NDArray[np.uint8]]]:
    """Those of each fragment, where each has its own. Raises WireError where they are not as many for each."""
    many, left = divmod(len(blocks), count)
    if left:
        raise WireError(f"series: {len(blocks)} blocks, expected as many for each of {count} fragments", "memory")
    return [blocks[begin : begin + many] for begin in range(0, len(blocks), many)]


def _lanes_and_rests(series: Series) -> list[tuple[int, Mapping[str, Any]]]:
    """Lane and rest of each fragment. Raises WireError where what each has for itself is not said for all of them."""
    if EACH not in series.rest:
        return [(series.lane, series.rest)] * series.count
    each = series.rest[EACH]
    if not isinstance(each, list) or len(each) != series.count or not all(isinstance(own, dict) for own in each):
        raise WireError(f"series: rest.{EACH} is {each!r:.100}, expected a list of {series.count} maps", "message")
    shared = {name: value for name, value in series.rest.items() if name != EACH}
    return [_of_one(own, shared, series.lane) for own in each]


def _of_one(own: dict[str, Any], shared: dict[str, Any], lane: int) -> tuple[int, Mapping[str, Any]]:
    """Lane and rest of the fragment that has this for itself. Raises WireError where the lane is none."""
    if LANE not in own:
        return lane, shared | own
    rest = {name: value for name, value in own.items() if name != LANE}
    return _check_lane(own[LANE], f"series: rest.{EACH}.{LANE}"), shared | rest
