"""Observations that take less room on the way, where both ends have zstandard and the trainer wants it.

A column is a tree of arrays; its compressed form is the same tree, of bytes `u8[...]`, and beside it, leaf by leaf,
what they were.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollflow.nodes.argument_checks import is_whole
from rollflow.nodes.offloaded.agent_fragment_message import PARTS
from rollflow.stream.data import zstd
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import WireError, shown
from rollflow.stream.data.tree import Tree, leaves_of, map_tree
from rollflow.stream.wire import Fragment

Columned = dict[str, Any]
COMPRESSED = (Columns.OBS, Columns.NEXT_OBS)


def compressed(message: Fragment) -> Fragment:
    """A message whose observations are compressed."""
    rest = message.rest
    if rest.get("by_module") is True:
        parts = {module_id: _compressed_columns(columns) for module_id, columns in message.columns.items()}
        columns: Columned = {module_id: part[0] for module_id, part in parts.items()}
        was: Any = {module_id: part[1] for module_id, part in parts.items()}
    elif rest.get("agents") is True:
        of_parts = [_compressed_columns(columns) for columns in message.columns[PARTS]]
        columns = {**message.columns, PARTS: [part[0] for part in of_parts]}
        was = [part[1] for part in of_parts]
    else:
        columns, was = _compressed_columns(message.columns)
    return replace(message, columns=columns, rest={**rest, "compressed": was})


def decompressed(message: Fragment) -> Fragment:
    """The message as it was; one that is not compressed is itself. Raises WireError where it can't be decompressed."""
    was, packed = message.rest.get("compressed"), message.columns
    if was is None:
        return message
    if message.rest.get("by_module") is True:
        if not isinstance(was, Mapping) or was.keys() != packed.keys():
            raise WireError(f"compressed is {shown(was)}, expected what is of each module", "fragment")
        columns: Columned = {
            module_id: _decompressed_columns(part, was[module_id]) for module_id, part in packed.items()
        }
    elif message.rest.get("agents") is True:
        parts = packed.get(PARTS)
        if not isinstance(was, list) or not isinstance(parts, list) or len(was) != len(parts):
            raise WireError(f"compressed is {shown(was)}, expected what is of each part", "fragment")
        columns = {**packed, PARTS: [_decompressed_columns(*part) for part in zip(parts, was, strict=True)]}
    else:
        columns = _decompressed_columns(packed, was)
    return replace(message, columns=columns)


def _compressed_columns(columns: Mapping[str, Tree]) -> tuple[Columned, Columned]:
    """With compressed observations, and what those were: column -> dtype and shape of each leaf."""
    packed, was = dict(columns), {}
    for name in COMPRESSED:
        if name not in columns:
            continue
        arrays = [np.ascontiguousarray(leaf) for leaf in leaves_of(columns[name])]
        was[name] = [[array.dtype.str, list(array.shape)] for array in arrays]
        packed[name] = map_tree(_compressed, columns[name])
    return packed, was


def _compressed(array: NDArray[Any]) -> NDArray[np.uint8]:
    return zstd.compressed(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _decompressed_columns(packed: Any, was: Any) -> Columned:
    if (
        not zstd.available()
        or not isinstance(packed, Mapping)
        or not isinstance(was, Mapping)
        or not was.keys() <= set(COMPRESSED) & packed.keys()
    ):
        raise WireError(f"compressed is {shown(was)}, expected columns that were asked for so", "fragment")
    columns = dict(packed)
    for name, kinds in was.items():
        if not isinstance(kinds, list) or len(kinds) != len(leaves_of(columns[name])):
            expected = "expected a dtype and a shape for each part"
            raise WireError(f"compressed: {name} is {shown(kinds)}, {expected}", "fragment")
        parts = iter(kinds)
        columns[name] = map_tree(lambda leaf, parts=parts: _decompressed(leaf, next(parts)), columns[name])
    return columns


def _decompressed(data: NDArray[Any], kind: Any) -> NDArray[Any]:
    try:
        name, shape = kind
        dtype, count = np.dtype(name), math.prod(shape)
        if dtype.hasobject or not all(is_whole(side) and side >= 0 for side in shape):
            raise WireError(f"compressed: {shown(kind)}, expected a dtype and a shape", "fragment")
        restored: NDArray[Any] = zstd.decompressed(data, dtype.itemsize * count).view(dtype).reshape(shape)
        return restored
    except (TypeError, ValueError) as error:
        raise WireError(f"compressed: {shown(kind)}: {error}", "fragment") from error
