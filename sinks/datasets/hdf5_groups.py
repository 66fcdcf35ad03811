"""HDF5 files of many small groups, written without the HDF5 library, which takes some 30 µs for each object.

Objects of one kind differ in a few numbers: their headers are made at once, as rows of an array of bytes. The layout is
that of the format's first version (https://support.hdfgroup.org/documentation/hdf5/latest/_f_m_t11.html): a superblock;
objects, each a header of messages; and for the root group a B-tree of one level over nodes with links, sorted by name.
Datasets lie end to end in one piece for a column, which each of them has a part of.
"""

import math
import os
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rollflow.sinks.datasets.stored_steps import Ints
from rollflow.stream.data.errors import DatasetError
from rollflow.stream.data.tree import Tree

_UNDEFINED = b"\xff" * 8  # an address of nothing
_SUPERBLOCK_BYTES = 96
_LINKS_IN_NODE = 128
_MOST_LINKS = 65_535 * _LINKS_IN_NODE  # a node of the B-tree counts its children in two bytes
# Kinds of messages.
_DATASPACE, _LINK_INFO, _DATATYPE, _LINK, _LAYOUT, _GROUP_INFO, _ATTRIBUTE, _SYMBOL_TABLE = 1, 2, 3, 6, 8, 10, 12, 17

Parts = Sequence[bytes | Ints]  # of K records: bytes are the same in all of them; numbers, i64[K], take eight bytes


class Hdf5Groups:
    """An HDF5 file whose root has groups; whole after a `with` block that ends without an error.

    path    of the file, which is overwritten

    Raises DatasetError at the end for more than 65,535 x 128 groups.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = open(path, "wb")
        self._file.write(bytes(_SUPERBLOCK_BYTES))
        self._end = _SUPERBLOCK_BYTES
        self._links: list[tuple[bytes, int]] = []  # of the root

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: object, *args: object) -> None:
        with self._file:
            if error is None:
                self._write_root()

    def add(
        self, names: Sequence[str], columns: Mapping[str, Tree], lengths: Mapping[str, Ints], **numbers: Ints
    ) -> None:
        """Add K groups, with a dataset, or a group of datasets, for each column.

        columns    name -> tree of arrays any[S, ...], the rows of the groups end to end
        lengths    name -> i64[K], rows of each group
        numbers    name of an attribute -> i64[K]
        """
        links = {name: self._tree(tree, lengths[name]) for name, tree in columns.items()}
        attributes = [_attribute(name, each) for name, each in numbers.items()]
        addresses = self._group(links, attributes)
        self._links += zip((name.encode() for name in names), addresses.tolist(), strict=True)

    def _tree(self, tree: Tree, lengths: Ints) -> Ints:
        """Write K objects with the parts of a tree; their addresses. A tuple is a group of `_index_0`, …."""
        if isinstance(tree, tuple | list):
            tree = {f"_index_{place}": part for place, part in enumerate(tree)}
        if isinstance(tree, dict):
            return self._group({name: self._tree(part, lengths) for name, part in tree.items()})
        return self._dataset(tree, lengths)

    def _group(self, links: Mapping[str, Ints], attributes: Sequence[Parts] = ()) -> Ints:
        info = _message(_LINK_INFO, [bytes(2), _UNDEFINED, _UNDEFINED]), _message(_GROUP_INFO, [bytes(2)])
        return self._objects([*info, *(_link(name, addresses) for name, addresses in links.items()), *attributes])

    def _dataset(self, rows: NDArray[Any], lengths: Ints) -> Ints:
        item_bytes, shape = rows.itemsize * math.prod(rows.shape[1:]), rows.shape[1:]
        space: Parts = [struct.pack("<BB6x", 1, rows.ndim), lengths, struct.pack(f"<{len(shape)}Q", *shape)]
        begins = self._append(rows) + (np.cumsum(lengths) - lengths) * item_bytes
        return self._objects(
            [
                _message(_DATASPACE, space),
                _message(_DATATYPE, [_datatype(rows.dtype)]),
                _message(_LAYOUT, [b"\x03\x01", begins, lengths * item_bytes]),
            ]
        )

    def _objects(self, messages: Sequence[Parts]) -> Ints:
        """Write K headers; their addresses, i64[K]."""
        parts = [part for message in messages for part in message]
        head = struct.pack("<BxHII4x", 1, len(messages), 1, _size(parts))
        rows = _rows([head, *parts])
        addresses: Ints = self._append(rows) + np.arange(len(rows)) * rows.shape[1]
        return addresses

    def _write_root(self) -> None:
        """Write the links of the root, and the superblock."""
        if len(self._links) > _MOST_LINKS:
            raise DatasetError(f"{len(self._links)} groups for one HDF5 file, expected {_MOST_LINKS} at most")
        self._links.sort()
        names = [name + bytes(8 - len(name) % 8) for name, _ in self._links]
        sizes = np.array([len(name) for name in names], np.int64)
        offsets: Ints = 8 + np.cumsum(sizes) - sizes  # an empty name comes first
        text = self._append(bytes(8) + b"".join(names))
        heap = self._append(b"HEAP" + struct.pack("<4xQQQ", 8 + int(sizes.sum()), 1, text))
        entries = _rows([offsets, np.array([address for _, address in self._links], np.int64), bytes(24)])
        firsts = range(0, len(entries), _LINKS_IN_NODE)
        keys, nodes = [0], []
        for first in firsts:
            node = entries[first : first + _LINKS_IN_NODE]
            head = b"SNOD" + struct.pack("<BxH", 1, len(node))
            nodes.append(self._append(head + node.tobytes() + bytes(40 * (_LINKS_IN_NODE - len(node)))))
            keys.append(int(offsets[first + len(node) - 1]))
        half = max(1, -(-len(nodes) // 2))  # children of a B-tree's node
        pairs = [number for pair in zip(keys, nodes, strict=False) for number in pair]
        tree = b"TREE" + struct.pack("<BBH", 0, 0, len(nodes)) + 2 * _UNDEFINED
        tree += struct.pack(f"<{len(pairs) + 1}Q", *pairs, keys[-1])
        tree_address = self._append(tree.ljust(24 + 8 * (4 * half + 1), b"\0"))
        table = np.array([tree_address]), np.array([heap])
        [root] = self._objects([_message(_SYMBOL_TABLE, table)])
        self._file.seek(0)
        head = b"\x89HDF\r\n\x1a\n" + struct.pack("<5xBBxHHI", 8, 8, _LINKS_IN_NODE // 2, half, 0)
        places = bytes(8) + _UNDEFINED + struct.pack("<Q", self._end) + _UNDEFINED
        self._file.write(head + places + struct.pack("<QQI4xQQ", 0, root, 1, tree_address, heap))

    def _append(self, content: bytes | NDArray[Any]) -> int:
        """Write bytes at the end, which stays a multiple of eight; their address."""
        address = self._end
        written = self._file.write(content if isinstance(content, bytes) else np.ascontiguousarray(content).data)
        self._end += written + self._file.write(bytes(-written % 8))
        return address


def _message(kind: int, parts: Parts) -> Parts:
    """A message of a header, with what pads it to a multiple of eight bytes."""
    padding = bytes(-_size(parts) % 8)
    return [struct.pack("<HH4x", kind, _size(parts) + len(padding)), *parts, padding]


def _link(name: str, addresses: Ints) -> Parts:
    text = name.encode()
    return _message(_LINK, [struct.pack("<BBBH", 1, 0x11, 1, len(text)) + text, addresses])  # a hard link, in UTF-8


def _attribute(name: str, numbers: Ints) -> Parts:
    """A whole number for each of K objects."""
    text, datatype, space = name.encode() + b"\0", _datatype(numbers.dtype), struct.pack("<BB6x", 1, 0)
    sizes = struct.pack("<BxHHH", 1, len(text), len(datatype), len(space))
    padded = [each + bytes(-len(each) % 8) for each in (text, datatype, space)]
    return _message(_ATTRIBUTE, [sizes, *padded, numbers])


def _datatype(dtype: np.dtype[Any]) -> bytes:
    """The type as in a message; h5py has two bytes more before it."""
    import h5py

    encoded: bytes = h5py.h5t.py_create(dtype, logical=True).encode()
    return encoded[2:]


def _size(parts: Parts) -> int:
    return sum(len(part) if isinstance(part, bytes) else 8 for part in parts)


def _rows(parts: Parts) -> NDArray[np.uint8]:
    """K records, u8[K, size]."""
    count = max(len(part) for part in parts if not isinstance(part, bytes))
    rows, end = np.empty((count, _size(parts)), np.uint8), 0
    for part in parts:
        begin, end = end, end + _size([part])
        if isinstance(part, bytes):
            rows[:, begin:end] = np.frombuffer(part, np.uint8)
        else:
            rows[:, begin:end] = part.astype("<i8")[:, None].view(np.uint8)
    return rows
