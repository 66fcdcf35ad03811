"""A lender and a borrower in one process, and where memory lies."""

import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from wire_messages import TOKEN, hello

from rollflow.sinks.trainer.lending import FragmentBorrower, FragmentLender
from rollflow.stream.data.tree import leaves_of
from rollflow.stream.multi_agent.agent_fragment import AgentFragment
from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment
from rollflow.stream.net.descriptor_transport import DescriptorTransport
from rollflow.stream.wire import (
    Done,
    Event,
    Fragment,
    Hello,
    Limits,
    ReceiverConnection,
    ReceiverSession,
    SenderConnection,
    SenderSession,
)


@contextmanager
def shared_address() -> Iterator[str]:
    """An address that fits into a socket's."""
    with tempfile.TemporaryDirectory() as folder:
        yield f"shm:{folder}/trainer"


class Pair:
    """A source and a trainer that are through with the handshake, over a pair of sockets.

    lender, session    of the source, which may have had others before
    """

    def __init__(self, lender: FragmentLender, session: SenderSession) -> None:
        self.lender, self.session = lender, session
        self.near, self.far = socket.socketpair()
        self.source = SenderConnection(
            hello(role="source", session=TOKEN), session, secret=None, limits=Limits(), now=0.0
        )
        self.trainer = ReceiverConnection(
            accepts="source", software="rollflow 0.1", nonce=bytes(32), secret=None, limits=Limits(), now=0.0
        )
        self.source_end = DescriptorTransport(self.near, self.source)
        self.trainer_end = DescriptorTransport(self.far, self.trainer)
        self.borrower: FragmentBorrower | None = FragmentBorrower(self.trainer_end)
        lender.begin(self.source, self.source_end)
        while not any(isinstance(event, Hello) for event in self.to_trainer()):
            self.to_source()
        trainer_session = ReceiverSession(TOKEN, session.given)  # it has all that there was
        self.trainer.welcome(trainer_session)
        self.to_source()

    def to_trainer(self) -> list[Event]:
        self.source_end.write()
        return self.trainer_end.read(0.0)

    def to_source(self) -> list[Event]:
        self.trainer_end.write()
        return self.source_end.read(0.0)

    def send(self, **columns: Any) -> None:
        """Send a fragment that has these columns."""
        self.session.given += 1
        message = Fragment(0, self.session.given, columns, {})
        self.lender.look_at(message)
        self.lender.send(message)

    def received(self) -> list[Fragment]:
        """Return the items that have come to the trainer."""
        fragments = []
        for event in self.to_trainer():
            assert isinstance(event, Fragment), event
            fragments.append(event if self.borrower is None else self.borrower.fragment(event))
        return fragments

    def give_back(self) -> tuple[int, ...]:
        """Have the source told what nobody reads any more; which blocks that are."""
        assert self.borrower is not None
        freed = self.borrower.freed()
        if freed:
            self.trainer.tell(Done(0, 0, freed))
        for event in self.to_source():
            assert isinstance(event, Done)
            self.lender.take_back(event.freed)
        return freed

    def lose(self) -> None:
        """Lose the connection; what the trainer has of it is what it has borrowed."""
        self.lender.end()
        self.source_end.close()
        self.trainer_end.close()
        self.borrower = None


def file_of(array: NDArray[Any]) -> tuple[int, int] | None:
    """The file that an array's memory is of, and how far from its beginning; None: it is of none without a name."""
    address = array.__array_interface__["data"][0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, _, inode, *name = line.split()
        begin, end = (int(part, 16) for part in span.split("-"))
        if begin <= address < end:
            return (int(inode), int(offset, 16) + address - begin) if "/memfd:rollflow" in "".join(name) else None
    raise AssertionError("there is no such memory")


def parts_of(fragment: Any) -> Sequence[Any]:
    """The fragments that it is made of: one, or one of each part of the agents."""
    return fragment.parts if isinstance(fragment, MultiAgentFragment) else [fragment]


def arrays_of(fragment: Any) -> list[NDArray[Any]]:
    """All arrays of a fragment that have bytes."""
    parts = parts_of(fragment)
    columns = [leaf for part in parts for column in part.columns.values() for leaf in leaves_of(column.tree)]
    more = [array for part in parts if isinstance(part, AgentFragment) for array in (part.clock, part.module_of)]
    return [array for array in [*columns, *more] if array.nbytes]


def files_mapped() -> set[str]:
    """Files without a name that this process sees."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "/memfd:rollflow" in line}


def numbers(seed: int, count: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).random(count, np.float32)
