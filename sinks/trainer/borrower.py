"""Borrower: a rollout's memory, as its trainer sees it.

Each fragment has an array of its own over every block that it lies in. Once that has gone, with all that was derived
from it, the rollout is told that it may write there again. A process that is forked off is not asked: it is to copy
what it goes on to read.
"""

import os
import weakref
from collections import deque
from itertools import count

import numpy as np
from numpy.typing import NDArray

from rollflow.stream.data.blocks import SharedBlock, never_shrinks
from rollflow.stream.data.errors import WireError
from rollflow.stream.net.descriptor_transport import Descriptor, DescriptorTransport
from rollflow.stream.wire import Block, Forget, Fragment, Lent, lent_columns

_MOST_BLOCKS = 1 << 16  # of one connection's
_MOST_FREED = 1024  # that are told at a time


class FragmentBorrower:
    """Makes fragments of what a source lends through one connection.

    transport    where the descriptors come
    """

    def __init__(self, transport: DescriptorTransport) -> None:
        self._transport = transport
        self._blocks: dict[int, SharedBlock] = {}
        self._debts: _LentBlocks | None = None

    def take(self, message: Block | Forget) -> None:
        """Take a block, or forget some. Raises WireError where it is none, or one that could be taken away again."""
        if isinstance(message, Block):
            self._map(message)
            return
        for number in message.blocks:
            if self._blocks.pop(number, None) is None:
                raise WireError(f"forget: block {number}, expected one that there is", "memory")

    def fragment(self, message: Lent) -> Fragment:
        """The fragment of a message, its arrays where they lie. Raises WireError if they lie nowhere."""
        blocks = [self._array_over(number) for number in message.blocks]
        return Fragment(message.lane, message.number, lent_columns(message.columns).tree(blocks), message.rest)

    def freed(self) -> tuple[int, ...]:
        """Blocks, once for each time that they were lent, that nobody reads any more: to be told to the source."""
        return () if self._debts is None else self._debts.settled()

    def _map(self, message: Block) -> None:
        if self._debts is None:
            self._debts = _LentBlocks(self._transport.claim())
        descriptor = self._transport.claim()
        if message.number in self._blocks or len(self._blocks) >= _MOST_BLOCKS:
            raise WireError(f"block {message.number}, expected a new one, of at most {_MOST_BLOCKS}", "memory")
        size = os.fstat(descriptor.fd).st_size
        if size < message.size or not never_shrinks(descriptor.fd):
            raise WireError(
                f"block {message.number} of {message.size} bytes: its file has {size}, expected as many for good",
                "memory",
            )
        block = self._blocks[message.number] = SharedBlock(message.size, descriptor.taken())
        block.close()

    def _array_over(self, number: int) -> NDArray[np.uint8]:
        block = self._blocks.get(number)
        if block is None or self._debts is None:
            raise WireError(f"lent: block {number}, expected one that there is", "memory")
        array = block.array()
        self._debts.owe(array, number)
        return array


class _LentBlocks:
    """Loans that have not been given back.

    life    shows the source that somebody has something of it, as long as it is open: this holds it, and is held by
            whatever was lent
    """

    def __init__(self, life: Descriptor) -> None:
        self._life = life
        self._serials = count()
        self._owed: dict[int, int] = {}  # serial number of a loan -> block
        self._let_go: deque[int] = deque()  # serial numbers

    def owe(self, array: NDArray[np.uint8], number: int) -> None:
        """Have a block back once an array over it has gone."""
        serial = next(self._serials)
        self._owed[serial] = number
        weakref.finalize(array, self.let_go, serial).atexit = False

    def let_go(self, serial: int) -> None:
        """An array has gone."""
        self._let_go.append(serial)

    def settled(self) -> tuple[int, ...]:
        """Blocks that are to be told."""
        serials = [self._let_go.popleft() for _ in range(min(len(self._let_go), _MOST_FREED))]
        return tuple([self._owed.pop(serial) for serial in serials])


def checked(borrower: FragmentBorrower | None, message: Block | Forget | Lent) -> FragmentBorrower:
    """The borrower of a connection. Raises WireError where a message of this kind has none."""
    if borrower is None:
        raise WireError(f"{message.kind} through a socket that no memory is shared by, expected none", "order")
    return borrower


def fragment_in(message: Fragment | Lent, borrower: FragmentBorrower | None) -> Fragment:
    """The fragment of a message. Raises WireError if arrays lie in no block."""
    return message if isinstance(message, Fragment) else checked(borrower, message).fragment(message)
