"""Memory that is used again and again, by one process or seen by several, and columns that lie in it.

A shared block has no name: it is a file that no folder lists, handed on as a descriptor, and the system takes it back
when the last process that holds it has ended, in whatever way. Where the system can see to it, it never gets smaller:
whoever has been handed one may read all of it, whatever others do.
"""

import fcntl
import math
import mmap
import os
import resource
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from rollflow.stream.column import Column
from rollflow.stream.tree import Tree, map_tree

_ALIGNMENT = 64  # bytes: a cache line, and what torch's fastest kernels want
_SPARE_FDS = 256  # for whatever else the process opens before it makes another block


class SharedBlock:
    """So many bytes, seen by every process that has the descriptor `fd`.

    Made new, or out of a descriptor that another process handed over. `address` is where this process sees it. `close`
    gives that descriptor back; the memory, and one descriptor that Python's mmap keeps for itself, stay for as long as
    an array over it is in use. Where the process comes near its limit of descriptors, this is raised as far as it may
    be.
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
        """Whether the descriptor has been given back."""
        return not self._closing.alive

    def array(self) -> NDArray[np.uint8]:
        """A new array over all of it, u8[size]; whatever is derived from it keeps it alive."""
        return np.frombuffer(self._memory, np.uint8)

    def write(self, data: bytes, offset: int = 0) -> None:
        """Put `data` so many bytes behind the beginning."""
        self._memory[offset : offset + len(data)] = data

    def taken(self) -> NDArray[np.uint8]:
        """An array over all of it, when the descriptor is not needed any more: it is given back."""
        self.close()
        return self.array()

    def close(self) -> None:
        """Give the descriptor back."""
        self._closing()


class _Memory(mmap.mmap):
    """A block's memory, which any array over it leads to."""

    block: "weakref.ref[SharedBlock]"


def root_of(array: NDArray[Any]) -> NDArray[Any]:
    """The array that this and others were derived from: as long as it is there, the block under it is in use."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def block_under(root: NDArray[Any]) -> SharedBlock | None:
    """The shared block that an array lies in that was derived from no other; None: in none that there still is."""
    memory = root.base.obj if isinstance(root.base, memoryview) else None
    return memory.block() if isinstance(memory, _Memory) else None


def address_of(array: NDArray[Any]) -> int:
    """Where an array's memory begins, as this process sees it."""
    address: int = array.__array_interface__["data"][0]
    return address


def never_shrinks(fd: int) -> bool:
    """Whether a file that another process handed over keeps its size: where not, it might be gone while it is read."""
    if not hasattr(os, "memfd_create"):
        return True  # there are none that do, here
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False


class PrivateBlock:
    """So many bytes of this process alone."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._memory = np.empty(size, np.uint8).data  # numpy asks for huge pages

    def array(self) -> NDArray[np.uint8]:
        """A new array over all of it, u8[size]; whatever is derived from it keeps it alive."""
        return np.frombuffer(self._memory, np.uint8)

    def close(self) -> None:
        """There is nothing to give back."""


B = TypeVar("B", SharedBlock, PrivateBlock)


class BlockPool(Generic[B]):
    """Blocks of one size, used again once no array over them is left.

    size    bytes of each
    make    makes one

    As many blocks are made as are in use at a time.
    """

    def __init__(self, size: int, make: Callable[[int], B]) -> None:
        self.size = size
        self.blocks: list[B] = []
        self._make: Callable[[int], B] = make
        self._free: deque[int] = deque()

    def take(self) -> tuple[int, NDArray[np.uint8]]:
        """The index of a block that nobody uses, and an array over it: it is taken back when that has gone."""
        if self._free:
            index = self._free.popleft()
        else:
            index = len(self.blocks)
            self.blocks.append(self._make(self.size))
        array = self.blocks[index].array()
        weakref.finalize(array, self._free.append, index).atexit = False
        return index, array

    def close(self) -> None:
        """Give back the descriptors."""
        for block in self.blocks:
            block.close()


class BlockLayout:
    """Where columns lie in a block.

    columns    name -> (a row of it, a tree of arrays `any[N, ...]`; how many rows)
    """

    def __init__(self, columns: Mapping[str, tuple[Tree, int]]) -> None:
        self.size = 0
        self._places = {
            name: map_tree(lambda leaf, rows=rows: self._place(leaf, rows), row)
            for name, (row, rows) in columns.items()
        }

    def columns(self, block: NDArray[np.uint8]) -> dict[str, Column]:
        """The columns, as views of a block of at least `size` bytes."""
        return {
            name: Column(name, map_tree(lambda place: place.view(block), places))
            for name, places in self._places.items()
        }

    def _place(self, leaf: NDArray[Any], rows: int) -> "_Place":
        place = _Place(self.size, leaf.dtype, (rows, *leaf.shape))
        self.size += -(-place.nbytes // _ALIGNMENT) * _ALIGNMENT
        return place


class _Place:
    """Where one array lies."""

    def __init__(self, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self._offset, self._dtype, self._shape = offset, dtype, shape
        self.nbytes = dtype.itemsize * math.prod(shape)

    def view(self, block: NDArray[np.uint8]) -> NDArray[Any]:
        return block[self._offset : self._offset + self.nbytes].view(self._dtype).reshape(self._shape)


def _make_room(fd: int) -> None:
    """Raise the process's limit of descriptors where the next one, which a copy of `fd` shows, is near to it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    following = os.dup(fd)
    os.close(following)
    if soft != hard and soft != resource.RLIM_INFINITY and following > soft - _SPARE_FDS:
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
