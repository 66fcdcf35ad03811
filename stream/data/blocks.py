"""Blocks of memory, private or shared between processes, pools that reuse them, and columns laid out in them.

A shared block is an anonymous file, passed on as a descriptor. The system frees it when the last process that holds it
has ended. If the system offers seals, a block can't shrink, so a process that got one can always read all of it.
"""

import math
import mmap
import os
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rollflow.stream.data.column import Column
from rollflow.stream.data.system import system_module
from rollflow.stream.data.tree import Tree, map_tree

resource = system_module("resource")
fcntl = system_module("fcntl")

_ALIGNMENT = 64  # bytes: a cache line, and what torch's fastest kernels want
_LEAST = 1 << 12  # bytes of a block for copies
_LEAST_SPARE, _MOST_SPARE, _MOST_KEPT = 1 << 16, 1 << 22, 1 << 25  # bytes of an array, and of all that is kept
_SPARE_FDS = 256  # descriptors left for other uses before the next block is made


class SharedBlock:
    """Memory of `size` bytes that is mapped by every process with the descriptor `fd`.

    fd         descriptor from another process, which this object then owns; None: make a new block
    address    of the first byte in this process

    `close` closes `fd`. The memory, and a second descriptor that Python's mmap keeps, stay while an array over it is
    in use. Near the process's limit of descriptors, the soft limit is raised to the hard one.
    """

    def __init__(self, size: int, fd: int | None = None) -> None:
        self.size = size
        self.fd = _anonymous_file(size) if fd is None else fd
        _make_room(self.fd)
        self._closing = weakref.finalize(self, os.close, self.fd)
        self._memory = _Memory(self.fd, size)
        self._memory.block = weakref.ref(self)
        self.address = address_of(self.array())

    @property
    def is_closed(self) -> bool:
        """True if the descriptor is closed."""
        return not self._closing.alive

    def array(self) -> NDArray[np.uint8]:
        """New array u8[size] over the whole block; arrays derived from it keep the block alive."""
        return np.frombuffer(self._memory, np.uint8)

    def write(self, data: bytes, offset: int = 0) -> None:
        """Copy `data` into the block, from byte `offset` on."""
        self._memory[offset : offset + len(data)] = data

    def taken(self) -> NDArray[np.uint8]:
        """Close the descriptor, and return an array u8[size] over the whole block."""
        self.close()
        return self.array()

    def close(self) -> None:
        """Close the descriptor. A second call does nothing."""
        self._closing()


def written_block(data: bytes) -> SharedBlock:
    """A block with a copy of `data`."""
    block = SharedBlock(len(data))
    block.write(data)
    return block


class _Memory(mmap.mmap):
    """The mapping of a block: the base of every array over it, so that `block_under` finds the block."""

    block: "weakref.ref[SharedBlock]"


def root_of(array: NDArray[Any]) -> NDArray[Any]:
    """The array that `array` is a view of, through all views; while it is alive, its block is in use."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def block_under(root: NDArray[Any]) -> SharedBlock | None:
    """The shared block under an array that `root_of` returned; None: there is none, or it is gone."""
    memory = root.base.obj if isinstance(root.base, memoryview) else None
    return memory.block() if isinstance(memory, _Memory) else None


def address_of(array: NDArray[Any]) -> int:
    """The address of an array's first byte in this process."""
    address: int = array.__array_interface__["data"][0]
    return address


def never_shrinks(fd: int) -> bool:
    """True if a file from another process is sealed against shrinking, so that reading it is safe."""
    if not hasattr(os, "memfd_create"):
        return True  # this system has no seals
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False


class PrivateBlock:
    """Memory of `size` bytes of this process alone, with the interface of `SharedBlock`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._memory = np.empty(size, np.uint8).data  # numpy asks for huge pages

    def array(self) -> NDArray[np.uint8]:
        """New array u8[size] over the whole block; arrays derived from it keep the block alive."""
        return np.frombuffer(self._memory, np.uint8)

    def close(self) -> None:
        """Do nothing: there is no descriptor."""


B = TypeVar("B", SharedBlock, PrivateBlock)


class BlockPool(Generic[B]):
    """Pool of blocks of one size. A block is reused once no array over it is left.

    size    bytes of each block
    make    function that makes a block of so many bytes
    """

    def __init__(self, size: int, make: Callable[[int], B]) -> None:
        self.size = size
        self.blocks: list[B] = []
        self._make: Callable[[int], B] = make
        self._free: deque[int] = deque()

    def take(self) -> tuple[int, NDArray[np.uint8]]:
        """The index of a free block and an array u8[size] over it; the block is free again when the array is gone."""
        if self._free:
            index = self._free.popleft()
        else:
            index = len(self.blocks)
            self.blocks.append(self._make(self.size))
        array = self.blocks[index].array()
        weakref.finalize(array, self._free.append, index).atexit = False
        return index, array

    @property
    def has_free(self) -> bool:
        """True if a block is free: the next one that is taken is no new one."""
        return bool(self._free)

    def close(self) -> None:
        """Close the descriptors of all blocks."""
        for block in self.blocks:
            block.close()


class SpareMemory:
    """Memory of arrays of middling sizes, which is used again once nothing refers to them: fresh memory costs more.

    The system gives fresh memory page by page, as it is first written, and takes more time for that than to write it.
    """

    def __init__(self) -> None:
        self._pools: dict[int, BlockPool[PrivateBlock]] = {}
        self._kept = 0  # bytes of all blocks
        self._lock = threading.Lock()  # several sinks may gather from one lane's fragments, each in its thread

    def __reduce__(self) -> Any:
        return SpareMemory, ()

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """A new array `dtype[shape]`; the contents are undefined."""
        count = math.prod(shape) * np.dtype(dtype).itemsize
        if not _LEAST_SPARE <= count <= _MOST_SPARE:
            return np.empty(shape, dtype)
        size = 1 << (count - 1).bit_length()
        with self._lock:
            pool = self._pools.setdefault(size, BlockPool(size, PrivateBlock))
            if not pool.has_free:
                if self._kept + size > _MOST_KEPT:
                    return np.empty(shape, dtype)
                self._kept += size
            block = pool.take()[1]
        return block[:count].view(dtype).reshape(shape)

    def clear(self) -> None:
        """Keep no memory any longer."""
        with self._lock:
            self._pools, self._kept = {}, 0


class ArrayPlaces:
    """Places of arrays `any[...]` in shared blocks; one that lies in no known block is copied into another.

    pools    of blocks for copies, by their size
    known    blocks that an array may stay in; None: all

    roots     block -> the array over it that keeps it from being written again
    copied    bytes of the copies
    """

    def __init__(
        self,
        arrays: Sequence[NDArray[Any]],
        pools: dict[int, BlockPool[SharedBlock]],
        known: Container[SharedBlock] | None = None,
    ) -> None:
        self.roots: dict[SharedBlock, NDArray[np.uint8]] = {}
        self.copied = 0
        self._known = known
        size = max(_LEAST, 1 << sum([array.nbytes + _ALIGNMENT for array in arrays]).bit_length())
        self._copies = pools.setdefault(size, BlockPool(size, SharedBlock))
        self._last: NDArray[np.uint8] | None = None  # root of the last array that stayed in its block
        self._at = self._address = 0  # index and address of that block

    def put(self, array: NDArray[Any]) -> tuple[int, int]:
        """Index in `roots` of the block that an array is in from now on, and its offset there."""
        if not array.nbytes:
            return 0, 0
        root = root_of(array)
        if root is not self._last:  # as a rule all lie in one block
            block = block_under(root)
            if block is None or (self._known is not None and block not in self._known):
                return self._copied(array)
            self._last, self._at, self._address = root, self._index_of(block, root), block.address
        offset = address_of(array) - self._address
        return self._copied(array) if offset % 8 else (self._at, offset)

    def _copied(self, array: NDArray[Any]) -> tuple[int, int]:
        if not self.copied:
            index, self._root = self._copies.take()
            self._copies_at = self._index_of(self._copies.blocks[index], self._root)
        offset, end = self.copied, self.copied + array.nbytes
        np.copyto(np.ndarray(array.shape, array.dtype, self._root, offset), array)
        self.copied = end + -end % _ALIGNMENT
        return self._copies_at, offset

    def _index_of(self, block: SharedBlock, root: NDArray[np.uint8]) -> int:
        self.roots.setdefault(block, root)
        return list(self.roots).index(block)


class BlockLayout:
    """Layout of columns in a block: the offset of each array, aligned to cache lines.

    columns    name -> (tree of arrays `any[N, ...]` that one row is like, number of rows)
    """

    def __init__(self, columns: Mapping[str, tuple[Tree, int]]) -> None:
        self.size = 0
        self._views: dict[str, Tree] = {
            name: map_tree(lambda leaf, rows=rows: self._view(leaf, rows), row) for name, (row, rows) in columns.items()
        }

    def columns(self, block: NDArray[np.uint8]) -> dict[str, Column]:
        """The columns as views of `block`, u8[n] with n >= `size`."""
        return {
            name: Column(name, view(block) if isinstance(view, partial) else map_tree(lambda leaf: leaf(block), view))
            for name, view in self._views.items()
        }

    def _view(self, leaf: NDArray[Any], rows: int) -> Callable[[NDArray[np.uint8]], NDArray[Any]]:
        shape = rows, *leaf.shape
        begin, end = self.size, self.size + leaf.dtype.itemsize * math.prod(shape)
        self.size += -(-(end - begin) // _ALIGNMENT) * _ALIGNMENT
        return partial(_viewed, slice(begin, end), leaf.dtype, shape)


def _viewed(at: slice, dtype: np.dtype[Any], shape: tuple[int, ...], block: NDArray[np.uint8]) -> NDArray[Any]:
    """An array in a block."""
    return block[at].view(dtype).reshape(shape)


def _make_room(fd: int) -> None:
    """Raise the soft limit of descriptors if the next free one, the number of a copy of `fd`, is near to it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    next_fd = os.dup(fd)
    os.close(next_fd)
    if soft != hard and soft != resource.RLIM_INFINITY and next_fd > soft - _SPARE_FDS:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _anonymous_file(size: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("rollflow", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    else:
        fd, path = tempfile.mkstemp()
        os.unlink(path)
        os.ftruncate(fd, size)
    return fd
