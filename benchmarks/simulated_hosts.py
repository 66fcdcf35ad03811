"""Simulated rollouts and hosts: a few processes with a socket for each of them, so that many cost little.

They speak the protocol, and do nothing else: a process answers with messages that were made once. So the processor's
time of the process that they connect to is its own alone.
"""

import multiprocessing
import resource
import select
import socket
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from time import perf_counter, process_time
from typing import Any, Protocol

from benchmarks.pairs import Record, record
from rollflow.stream import wire

_PROCESSES = 2
_FORK = multiprocessing.get_context("fork")
_LARGE = 1 << 16  # bytes of a frame that is only counted
_LENGTHS = struct.Struct("<2I")
_SPARE = 64  # descriptors besides connections
_MOST_STRANGERS = 64  # that a process has dialled and that are not welcomed
_ADDRESSES = 16  # that are dialled from, on loopback: each has ports of its own


class SimulatedPeer(Protocol):
    """One rollout or host among those of a process."""

    def hello(self) -> wire.Hello:
        """Its introduction."""
        ...

    def take(self, message: wire.Message) -> Iterable[wire.Message]:
        """What it sends after a message that has come, the handshake and heartbeats left out."""
        ...


PeerMaker = Callable[[int], SimulatedPeer]  # makes the peer of a number


@contextmanager
def simulated(address: wire.TcpAddress, count: int, peer_of: PeerMaker) -> Iterator[list[Any]]:
    """So many peers that dial an address, in processes of their own.

    Yields pipes, one for each process, that give True once each of its peers has got one large frame.
    """
    with ExitStack() as closing:
        pipes, first = [], 0
        for part in parts_of(count):
            numbers = range(first, first + part)
            pipes.append(closing.enter_context(process(_simulate, (address.host, address.port), numbers, peer_of)))
            first += part
        yield pipes


def parts_of(count: int) -> list[int]:
    """So many of something, shared out to processes."""
    return [part for number in range(_PROCESSES) if (part := count // _PROCESSES + (number < count % _PROCESSES))]


@contextmanager
def process(target: Any, *args: Any) -> Iterator[Any]:
    """A process of a function that is given a pipe and arguments; killed at the end. Yields the pipe's other end."""
    here, there = _FORK.Pipe()
    child = _FORK.Process(target=target, args=(there, *args), daemon=True)
    child.start()
    try:
        yield here
    finally:
        child.kill()
        child.join()


def descriptors(wanted: int) -> int:
    """Connections that this process may have; what the system allows is said where it is less than wanted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted + _SPARE <= hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted + _SPARE, hard))
        soft = wanted + _SPARE
    if soft < wanted + _SPARE:
        print(f"{soft} descriptors are allowed here (ulimit -n), of {wanted + _SPARE} wanted", file=sys.stderr)
    return soft - _SPARE


def allowed(hosts: Sequence[int]) -> list[int]:
    """Those numbers of hosts for which this process may have connections enough."""
    most = descriptors(max(hosts))
    return [number for number in hosts if number <= most]


def per_second_of_processor(items: Iterator[Any], first: int, seconds: float) -> float:
    """Items that an iterator gives in a second of this process's time, after so many of them."""
    for _ in range(first):
        next(items)
    began, used, given = perf_counter(), process_time(), 0
    while perf_counter() - began < seconds:
        next(items)
        given += 1
    return given / (process_time() - used)


def beside_fewest(hosts: Sequence[int], name: Callable[[int], str], rate: Callable[[int], float]) -> list[Record]:
    """A line for each number of hosts, with its name and its rate, beside the rate of the first number."""
    rates = [rate(number) for number in hosts]
    return [
        record(name(number), number, [(each, rates[0])], aim=0.5)
        | {"where": "remote", "beside_name": f"{hosts[0]} hosts"}
        for number, each in zip(hosts, rates, strict=True)
    ]


# In the processes


class _Connection:
    """Connection of a simulated peer.

    address    dialled
    source     address that it is dialled from
    """

    def __init__(self, address: tuple[str, int], source: str, peer: SimulatedPeer) -> None:
        self.sock = socket.create_connection(address, source_address=(source, 0))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.is_welcomed = False
        self._peer, self._held, self._skipping = peer, b"", 0
        self._send([peer.hello()])

    def read(self, scratch: memoryview) -> int:
        """Take what has come; the number of large frames that are complete now."""
        count = self.sock.recv_into(scratch)
        if not count:
            raise EOFError("the other end has closed the connection")
        data, large = scratch[:count], 0
        if self._skipping:
            passed = min(self._skipping, count)
            self._skipping -= passed
            data, large = data[passed:], int(not self._skipping)
        held = self._held + data.tobytes() if len(data) else self._held
        while len(held) >= 4:
            size = 4 + _LENGTHS.unpack_from(held.ljust(8, b"\0"))[0]
            if size > _LARGE:
                self._skipping, held = max(0, size - len(held)), held[size:]
                large += not self._skipping
                continue
            if len(held) < size:
                break
            self._take(wire.decode(held[:size]))
            held = held[size:]
        self._held = held
        return large

    def _take(self, message: wire.Message) -> None:
        match message:
            case wire.Challenge():
                self._send([wire.Proof(b"")])
            case wire.Ping():
                self._send([wire.Pong(message.number)])
            case wire.Refused():
                raise EOFError(message.text)
            case _:
                self.is_welcomed = self.is_welcomed or isinstance(message, wire.Welcome)
                self._send(self._peer.take(message))

    def _send(self, messages: Iterable[wire.Message]) -> None:
        for message in messages:
            self.sock.sendall(b"".join(wire.encode(message)))


def _simulate(got: Any, address: tuple[str, int], numbers: Sequence[int], peer_of: PeerMaker) -> None:
    descriptors(len(numbers))
    poll, by_fd = select.epoll(), dict[int, _Connection]()
    waiting, strangers, left = list(numbers), set[int](), len(numbers)
    scratch = memoryview(bytearray(1 << 20))
    while True:
        while waiting and len(strangers) < _MOST_STRANGERS:
            number = waiting.pop()
            made = _Connection(address, f"127.0.0.{1 + number % _ADDRESSES}", peer_of(number))
            by_fd[made.sock.fileno()] = made
            poll.register(made.sock, select.EPOLLIN)
            strangers.add(made.sock.fileno())
        for fd, _ in poll.poll():
            left -= by_fd[fd].read(scratch)
            if by_fd[fd].is_welcomed:
                strangers.discard(fd)
        if not left:
            got.send(True)
            left = -1
