"""Borrower: a rollout's memory, as its trainer sees it.

Each fragment has an array of its own over every block that it lies in. Once that has gone, with all that was derived
from it, in this process and in those that were forked meanwhile, the rollout is told that it may write there again.
"""

import os
import weakref
from collections import deque
from itertools import count

import numpy as np
from numpy.typing import NDArray

from rollflow.sinks.trainer.trainer_side import forks
from rollflow.stream.data.blocks import SharedBlock, never_shrinks
from rollflow.stream.data.errors import WireError
from rollflow.stream.net.descriptor_transport import Descriptor, DescriptorTransport
from rollflow.stream.wire import Block, Forget, Fragment, Lent, Series, lent_columns, series_parts

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

    def fragments(self, message: Lent | Series) -> list[Fragment]:
        """The fragments of a message, their arrays where they lie. Raises WireError where they lie nowhere."""
        blocks = [self._array_over(number) for number in message.blocks]
        if isinstance(message, Series):
            return series_parts(message, blocks)
        return [Fragment(message.lane, message.number, lent_columns(message.columns).tree(blocks), message.rest)]

    def freed(self) -> tuple[int, ...]:
        """Blocks, once for each time that they were lent, that nobody reads any more: to be told to the source."""
        return () if self._debts is None else self._debts.settled()

    def _map(self, message: Block) -> None:
        if self._debts is None:
            self._debts = _LentBlocks(self._transport.claim())
            forks.watch(self._debts)
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

    def owed(self) -> set[int]:
        """Serial numbers of all loans that the source has not been told to be over."""
        return set(self._owed)

    def let_go(self, serial: int) -> None:
        """An array has gone."""
        self._let_go.append(serial)

    def settled(self) -> tuple[int, ...]:
        """Blocks that are to be told."""
        if not self._let_go:
            return ()
        with forks.lock:
            serials = [self._let_go.popleft() for _ in range(min(len(self._let_go), _MOST_FREED))]
            inherited = forks.inherited(self)
            self._let_go += [serial for serial in serials if serial in inherited]
            return tuple(self._owed.pop(serial) for serial in serials if serial not in inherited)


def checked(borrower: FragmentBorrower | None, message: Block | Forget | Lent | Series) -> FragmentBorrower:
    """The borrower of a connection. Raises WireError where a message of this kind has none."""
    if borrower is None:
        raise WireError(f"{message.kind} through a socket that no memory is shared by, expected none", "order")
    return borrower


def fragments_in(message: Fragment | Lent | Series, borrower: FragmentBorrower | None) -> list[Fragment]:
    """The fragments in a message. Raises WireError where arrays lie in no block."""
    if isinstance(message, Fragment):
        return [message]
    if isinstance(message, Series):
        if (message.data is None) != bool(message.blocks):
            raise WireError("series with data and blocks, or with none of them, expected one", "memory")
        if not message.blocks:
            return series_parts(message, [np.asarray(message.data)])
    return checked(borrower, message).fragments(message)
