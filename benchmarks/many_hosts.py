"""A trainer with up to a thousand rollouts: what a message costs as they become more, and how weights reach all.

The rollouts are simulated, by a few processes with a socket for each rollout: they shake hands, and send fragments as
far as their windows allow. So the processor's time is the trainer's alone. In one line all send; in the other ten do,
beside those that only keep their connection. Weights of 10 MB are published once to all, beside the same bytes through
as many plain sockets.

    python -m benchmarks.many_hosts [--quick]
"""

import multiprocessing
import os
import resource
import select
import socket
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from time import perf_counter, process_time
from typing import Any

import torch

from benchmarks.command import run
from benchmarks.feeder import description_of, fragments_of
from benchmarks.pairs import Record, Sizes, record
from rollflow.sinks import TrainerStream
from rollflow.stream import wire

HOSTS, ACTIVE, PROCESSES = (10, 100, 1000), 10, 2
WEIGHTS = 10_000_000 // 4  # numbers, of four bytes each
_SIZE = 1 << 14  # bytes of a fragment
_LARGE = 1 << 16  # bytes of a frame that is only counted
_LENGTHS = struct.Struct("<2I")
_SPARE = 64  # descriptors besides connections
FORK = multiprocessing.get_context("fork")


def measure(sizes: Sizes, hosts: Sequence[int] = HOSTS, weights: int = WEIGHTS) -> list[Record]:
    """Lines for the messages of each number of hosts, all and ten of them at work, and one for the weights."""
    most = descriptors(max(hosts))
    hosts = [count for count in hosts if count <= most]
    lines = []
    for name, active in (("all send", None), (f"{ACTIVE} send", ACTIVE)):
        first = 0.0
        for count in hosts:
            rate = per_second_of_processor(count, min(active or count, count), max(1.0, sizes.seconds))
            first = first or rate
            line = record(f"messages of {count} hosts, {name} (per CPU s)", count, [(rate, first)], aim=0.5)
            lines.append(line | {"where": "remote", "beside_name": f"{hosts[0]} hosts"})
    ours, plain = weights_reach(hosts[-1], weights), bytes_reach(hosts[-1], 4 * weights)
    rates = tuple(hosts[-1] * 4 * weights / seconds / 1e6 for seconds in (ours, plain))
    line = record(f"weights to {hosts[-1]} hosts (MB/s)", hosts[-1], [(rates[0], rates[1])], aim=0.5)
    return [*lines, line | {"where": "remote", "beside_name": "plain sockets"}]


def descriptors(wanted: int) -> int:
    """Connections that this process may have; what the system allows is said where it is less than wanted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted + _SPARE <= hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted + _SPARE, hard))
        soft = wanted + _SPARE
    if soft < wanted + _SPARE:
        print(f"{soft} descriptors are allowed here (ulimit -n), of {wanted + _SPARE} wanted", file=sys.stderr)
    return soft - _SPARE


def per_second_of_processor(hosts: int, active: int, seconds: float) -> float:
    """Fragments that a trainer takes in a second of its processor's time."""
    with simulated(hosts, active, 0) as (stream, _):
        fragments = iter(stream)
        for _ in range(4 * active):
            next(fragments)
        began, used, count = perf_counter(), process_time(), 0
        while perf_counter() - began < seconds:
            next(fragments)
            count += 1
        return count / (process_time() - used)


def weights_reach(hosts: int, weights: int) -> float:
    """Seconds from `publish` until every host has the weights."""
    with simulated(hosts, 1, weights) as (stream, have_got):
        next(iter(stream))
        began = perf_counter()
        stream.publish({"w": torch.zeros(weights)})
        for got in have_got:
            got.recv()
        return perf_counter() - began


def bytes_reach(hosts: int, size: int) -> float:
    """Seconds that as many plain sockets take for as many bytes each."""
    with ExitStack() as closing, socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
        got = [
            closing.enter_context(_process(_read_all, listening.getsockname(), part, size)) for part in _parts(hosts)
        ]
        socks = [closing.enter_context(listening.accept()[0]) for _ in range(hosts)]
        left, poll, data = dict.fromkeys((sock.fileno() for sock in socks), size), select.epoll(), bytes(size)
        by_fd = {sock.fileno(): sock for sock in socks}
        for sock in socks:
            sock.setblocking(False)
            poll.register(sock, select.EPOLLOUT)
        began, view = perf_counter(), memoryview(data)
        while by_fd:
            for fd, _ in poll.poll():
                left[fd] -= by_fd[fd].send(view[size - left[fd] :][: 1 << 22])
                if not left[fd]:
                    poll.unregister(fd)
                    del by_fd[fd]
        for each in got:
            each.recv()
        return perf_counter() - began


@contextmanager
def simulated(hosts: int, active: int, weights: int) -> Iterator[tuple[TrainerStream, list[Any]]]:
    """A stream with so many simulated rollouts, and pipes that say when those of a process have got weights."""
    with ExitStack() as closing:
        stream = TrainerStream("tcp://127.0.0.1:0", yields="fragments", sources=hosts, join_timeout=120.0)
        closing.enter_context(stream)
        address = stream.address
        assert isinstance(address, wire.TcpAddress)
        parts, pipes = _parts(hosts), []
        for number, part in enumerate(parts):
            sends = active // len(parts) + (number < active % len(parts))
            job = (address.host, address.port), part, sends, weights
            pipes.append(closing.enter_context(_process(_simulate, *job)))
        yield stream, pipes


def _parts(hosts: int) -> list[int]:
    return [part for number in range(PROCESSES) if (part := hosts // PROCESSES + (number < hosts % PROCESSES))]


@contextmanager
def _process(target: Any, *args: Any) -> Iterator[Any]:
    here, there = FORK.Pipe()
    process = FORK.Process(target=target, args=(there, *args), daemon=True)
    process.start()
    try:
        yield here
    finally:
        process.kill()
        process.join()


# In the processes


class _Host:
    """A simulated rollout.

    sends    whether it sends fragments
    """

    def __init__(self, address: Any, hello: bytes, *, sends: bool) -> None:
        self.sock = socket.create_connection(address)
        self.sock.sendall(hello)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.window = self.given = self.done = self.skipping = 0
        self._sends, self._held = sends, b""

    def read(self, scratch: memoryview) -> int:
        """Take what has come; the bytes of large frames that are complete now."""
        count = self.sock.recv_into(scratch)
        if not count:
            raise EOFError
        data, large = scratch[:count], 0
        if self.skipping:
            passed = min(self.skipping, count)
            self.skipping -= passed
            data, large = data[passed:], int(not self.skipping)
        held = self._held + data.tobytes() if len(data) else self._held
        while len(held) >= 4:
            size = 4 + _LENGTHS.unpack_from(held.ljust(8, b"\0"))[0]
            if size > _LARGE:
                self.skipping, held = max(0, size - len(held)), held[size:]
                large += not self.skipping
                continue
            if len(held) < size:
                break
            self._take(wire.decode(held[:size]))
            held = held[size:]
        self._held = held
        return large

    def send(self, columns: Any, rest: Any) -> None:
        """Send fragments, as many as the window allows."""
        while self._sends and self.given < self.done + self.window:
            self.given += 1
            fragment = wire.Fragment(0, self.given, columns, rest | {"sequence": self.given - 1})
            self.sock.sendall(b"".join(wire.encode(fragment)))

    def _take(self, message: wire.Message) -> None:
        match message:
            case wire.Challenge():
                self.sock.sendall(b"".join(wire.encode(wire.Proof(b""))))
            case wire.Settings():
                self.window = message.settings["window"]
            case wire.Done():
                self.done = message.number
            case wire.Ping():
                self.sock.sendall(b"".join(wire.encode(wire.Pong(message.number))))


def _simulate(got: Any, address: Any, hosts: int, active: int, weights: int) -> None:
    fragment, described = fragments_of(_SIZE)
    described["metadata"] |= {"sends": "fragments", "weights": {"w": [weights]} if weights else {}}
    poll, by_fd = select.epoll(), {}
    for number in range(hosts):
        host = _Host(address, _hello(described), sends=number < active)
        by_fd[host.sock.fileno()] = host
        poll.register(host.sock, select.EPOLLIN)
    scratch, left = memoryview(bytearray(1 << 20)), hosts
    while True:
        for fd, _ in poll.poll():
            left -= by_fd[fd].read(scratch)
            by_fd[fd].send(fragment.columns, fragment.rest)
        if not left:
            got.send(True)
            left = -1


def _hello(described: dict[str, Any]) -> bytes:
    return b"".join(wire.encode(description_of(os.urandom(wire.SESSION_BYTES), described)))


def _read_all(got: Any, address: Any, hosts: int, size: int) -> None:
    socks = [socket.create_connection(address) for _ in range(hosts)]
    poll, scratch, left = select.epoll(), bytearray(1 << 20), hosts * size
    by_fd = {sock.fileno(): sock for sock in socks}
    for sock in socks:
        poll.register(sock, select.EPOLLIN)
    while left:
        for fd, _ in poll.poll():
            left -= by_fd[fd].recv_into(scratch)
    got.send(True)


if __name__ == "__main__":
    run(measure)
