"""Lending: a rollout's memory, lent to a trainer on the same host, and how the trainer sees it.

A fragment's arrays stay where the environments wrote them, where that is shared memory; others are copied into blocks
of the lender's own. What is lent is written again only once the trainer has said that nobody there reads it any more,
or once nobody is left who could: each connection has a pipe, `life`, the other end of which the trainer and its
children hold for as long as they have anything that was lent through it.

At the trainer each fragment has an array of its own over every block that it lies in. Once that has gone, with all that
was derived from it, the rollout is told that it may write there again. A process that is forked off is not asked: it is
to copy what it goes on to read.
"""

import logging
import os
import weakref
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollflow.sinks.trainer.messages import is_batch
from rollflow.stream import wire
from rollflow.stream.data.blocks import ArrayPlaces, BlockPool, SharedBlock, block_under, never_shrinks, root_of
from rollflow.stream.data.errors import WireError
from rollflow.stream.data.tree import leaves_of
from rollflow.stream.net.descriptor_transport import Descriptor, DescriptorTransport
from rollflow.stream.wire import Fragment
from rollflow.stream.wire.codec.value import decode_lent, encode_value

logger = logging.getLogger(__name__)


class FragmentLender:
    """Sends fragments with their arrays lent through shared memory.

    most    bytes that may be lent at a time; more is sent as through any other socket

    `look_at` is for the thread that the rollout runs in, all else for the one that sends.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._descriptors: weakref.WeakKeyDictionary[SharedBlock, Descriptor] = weakref.WeakKeyDictionary()
        self._pools: dict[int, BlockPool[SharedBlock]] = {}  # of blocks for copies, by size
        self._loans: _Loans | None = None  # through the connection that there is
        self._left: list[_Loans] = []  # through those that there were
        self._has_warned = False

    @property
    def nbytes(self) -> int:
        """Bytes that are lent."""
        return sum(loans.nbytes for loans in (*self._left, self._loans) if loans is not None)

    def look_at(self, message: wire.Fragment) -> None:
        """Take down which blocks a fragment lies in, while whoever made them still has their descriptors."""
        if is_batch(message):
            return  # which is copied
        roots = {id(root): root for tree in message.columns.values() for root in map(root_of, leaves_of(tree))}
        for block in map(block_under, roots.values()):
            if block is not None and not block.is_closed:
                self._keep_descriptor(block)

    def begin(self, connection: wire.SenderConnection, transport: DescriptorTransport) -> None:
        """Lend through this connection from now on."""
        self.end()
        self._loans = _Loans(connection, transport)

    def end(self) -> None:
        """The connection is lost, or has ended; what was lent through it may be read for as long as somebody likes."""
        if self._loans is not None:
            self._left.append(self._loans)
            self._loans = None

    def send(self, message: wire.Fragment) -> None:
        """Send a fragment, or a train batch, with its arrays lent; with copies if they may not be lent as well."""
        assert self._loans is not None
        loans, leaves = self._loans, [leaf for tree in message.columns.values() for leaf in leaves_of(tree)]
        size = sum([leaf.nbytes for leaf in leaves])
        if self._has_room(size):
            self._lend(message, leaves, size, loans)
        else:
            loans.send(message)

    def take_back(self, blocks: Sequence[int]) -> None:
        """Take back blocks that nobody reads any more."""
        assert self._loans is not None
        for number in blocks:
            self._loans.take_back(number)

    def _has_room(self, size: int) -> bool:
        """True if so many more bytes may be lent; logs once that they may not."""
        self._left = [left for left in self._left if not left.are_over()]
        lent = self.nbytes
        if not lent or lent + size <= self._most:
            return True
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the trainer still has %d bytes of fragments in shared memory, of at most %d: it is sent copies, until "
                "it lets go of some",
                lent,
                self._most,
            )
        return False

    def _keep_descriptor(self, block: SharedBlock) -> None:
        if block not in self._descriptors:
            self._descriptors[block] = Descriptor(os.dup(block.fd))

    def _lend(self, message: wire.Fragment, leaves: list[NDArray[Any]], size: int, loans: "_Loans") -> None:
        """Send a fragment with its arrays lent, so many bytes of them."""
        # A train batch may be written to by the trainer, and would come as something else if it were sent again.
        places = ArrayPlaces(leaves, self._pools, () if is_batch(message) else self._descriptors)
        columns, _ = encode_value(message.columns, "columns", places.put)
        for block in places.roots:
            self._keep_descriptor(block)
        blocks = tuple([loans.number_of(block, self._descriptors[block]) for block in places.roots])
        loans.send(message, blocks, columns)
        loans.lend(blocks, [*places.roots.values()], size)


class _Loans:
    """Loans through one connection.

    nbytes    of all arrays that are lent
    """

    def __init__(self, connection: wire.SenderConnection, transport: DescriptorTransport) -> None:
        self.connection = connection
        self.nbytes = 0
        self._transport = transport
        mine, theirs = os.pipe()
        self._life, self._their_life = Descriptor(mine), [Descriptor(theirs)]
        self._numbers: weakref.WeakKeyDictionary[SharedBlock, int] = weakref.WeakKeyDictionary()
        self._count = 0
        self._new: list[list[int]] = []  # numbers and bytes of blocks that the trainer is to be told of
        self._gone: deque[int] = deque()  # blocks that are no more
        self._out: dict[int, deque[tuple[NDArray[Any], int]]] = {}  # what keeps each block from being written again

    def number_of(self, block: SharedBlock, descriptor: Descriptor) -> int:
        """The number of a block; one that is new is handed over to the trainer."""
        number = self._numbers.get(block)
        if number is None:
            number = self._numbers[block] = self._count
            self._count += 1
            while self._their_life:
                self._transport.hand_over(self._their_life.pop())
            self._transport.hand_over(descriptor)
            self._new.append([number, block.size])
            weakref.finalize(block, self._gone.append, number).atexit = False
        return number

    def send(self, message: Fragment, blocks: tuple[int, ...] = (), columns: bytes | None = None) -> None:
        """Send a fragment whose columns lie in blocks, by this header, or go with it, and news of blocks."""
        new, gone = [*self._new], list(islice(self._gone, 1024))
        if columns is not None or new or gone:
            # Blocks that are shared from now on, whose descriptors come before this, and their bytes; those in which
            # nothing more will be lent; those that this lends once, and the header of its columns in them.
            lent = {"new": new, "gone": gone, "blocks": [*blocks], "columns": columns}
            own = message.columns if columns is None else {}
            message = Fragment(message.lane, message.number, own, {**message.rest, "lent": lent})
        self.connection.send(message)
        del self._new[: len(new)]
        for _ in gone:
            self._gone.popleft()

    def lend(self, numbers: tuple[int, ...], roots: list[NDArray[Any]], nbytes: int) -> None:
        """Keep blocks from being written again: their arrays, so many bytes of which were lent."""
        self.nbytes += nbytes
        for number, root in zip(numbers, roots, strict=True):
            self._out.setdefault(number, deque()).append((root, nbytes))
            nbytes = 0  # which count once

    def take_back(self, number: int) -> None:
        """Once for each time that a block was lent."""
        out = self._out[number]
        _, nbytes = out.popleft()
        self.nbytes -= nbytes
        if not out:
            del self._out[number]

    def are_over(self) -> bool:
        """True if no process is left that could read what was lent."""
        self._their_life.clear()
        return self._life.is_hung_up()


_MOST_FREED = 1024  # that are told at a time


class FragmentBorrower:
    """Makes fragments of what a source lends through one connection.

    transport    where the descriptors come
    """

    def __init__(self, transport: DescriptorTransport) -> None:
        self._transport = transport
        self._blocks: dict[int, SharedBlock] = {}
        # Shows the source that somebody has something of it, as long as it is open: whatever was lent holds it.
        self._life: Descriptor | None = None
        self._freed: deque[int] = deque()  # blocks, once for each array that has gone

    def fragment(self, message: Fragment) -> Fragment:
        """A fragment with its arrays where they lie. Raises WireError for a block that could be taken away again."""
        rest = dict(message.rest)
        lent = rest.pop("lent", None)
        if lent is None:
            return message
        for number, size in lent["new"]:
            self._map(number, size)
        blocks, header = [self._array_over(number) for number in lent["blocks"]], lent["columns"]
        for number in lent["gone"]:
            del self._blocks[number]
        columns = message.columns if header is None else decode_lent(header, blocks)
        return Fragment(message.lane, message.number, columns, rest)

    def freed(self) -> tuple[int, ...]:
        """Blocks, once for each time that they were lent, that nobody reads any more: to be told to the source."""
        return tuple([self._freed.popleft() for _ in range(min(len(self._freed), _MOST_FREED))])

    def _map(self, number: int, size: int) -> None:
        if self._life is None:
            self._life = self._transport.claim()
        descriptor = self._transport.claim()
        has = os.fstat(descriptor.fd).st_size
        if has < size or not never_shrinks(descriptor.fd):
            raise WireError(f"block {number} of {size} bytes: its file has {has}, expected as many for good", "memory")
        block = self._blocks[number] = SharedBlock(size, descriptor.taken())
        block.close()

    def _array_over(self, number: int) -> NDArray[np.uint8]:
        assert self._life is not None  # which came with the first block
        array = self._blocks[number].array()
        weakref.finalize(array, _give_back, self._life, self._freed, number).atexit = False
        return array


def _give_back(life: Descriptor, freed: deque[int], number: int) -> None:
    """Note that an array over a block has gone. Whoever is to call this holds the connection's life open."""
    freed.append(number)
