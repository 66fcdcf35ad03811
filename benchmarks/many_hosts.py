"""A trainer with up to a thousand rollouts: what a message costs as they become more, and how weights reach all.

The rollouts are simulated, see `simulated_hosts`, and send fragments as far as their windows allow. In one line all
send; in the other ten do, beside those that only keep their connection. Weights of 10 MB are published once to all,
beside the same bytes through as many plain sockets.

    python -m benchmarks.many_hosts [--quick]
"""

import os
import select
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import Any

import torch

from benchmarks.command import run
from benchmarks.feeder import description_of, fragments_of
from benchmarks.pairs import Record, Sizes, record
from benchmarks.simulated_hosts import allowed, beside_fewest, parts_of, per_second_of_processor, process, simulated
from rollflow import TrainerStream
from rollflow.sinks import Sources
from rollflow.stream import wire

HOSTS, ACTIVE = (10, 100, 1000), 10
WEIGHTS = 10_000_000 // 4  # numbers, of four bytes each
_SIZE = 1 << 14  # bytes of a fragment


def measure(sizes: Sizes, hosts: Sequence[int] = HOSTS, weights: int = WEIGHTS) -> list[Record]:
    """Lines for the messages of each number of hosts, all and ten of them at work, and one for the weights."""
    hosts, seconds = allowed(hosts), max(1.0, sizes.seconds)
    lines = []
    for name, active in (("all send", None), (f"{ACTIVE} send", ACTIVE)):
        lines += beside_fewest(
            hosts,
            lambda count, name=name: f"messages of {count} hosts, {name} (per CPU s)",
            lambda count, active=active: fragments_taken(count, min(active or count, count), seconds),
        )
    ours, plain = weights_reach(hosts[-1], weights), bytes_reach(hosts[-1], 4 * weights)
    rates = tuple(hosts[-1] * 4 * weights / seconds / 1e6 for seconds in (ours, plain))
    line = record(f"weights to {hosts[-1]} hosts (MB/s)", hosts[-1], [(rates[0], rates[1])], aim=0.5)
    return [*lines, line | {"where": "remote", "beside_name": "plain sockets"}]


def fragments_taken(hosts: int, active: int, seconds: float) -> float:
    """Fragments that a trainer takes in a second of its processor's time."""
    with feeding(hosts, active, 0) as (stream, _):
        return per_second_of_processor(iter(stream), 4 * active, seconds)


def weights_reach(hosts: int, weights: int) -> float:
    """Seconds from `publish` until every host has the weights."""
    with feeding(hosts, 1, weights) as (stream, have_got):
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
            closing.enter_context(process(_read_all, listening.getsockname(), part, size)) for part in parts_of(hosts)
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
def feeding(hosts: int, active: int, weights: int) -> Iterator[tuple[TrainerStream, list[Any]]]:
    """A stream with so many simulated rollouts, and pipes that say when those of a process have got weights."""
    fragment, described = fragments_of(_SIZE)
    described["metadata"] |= {"sends": "fragments", "weights": {"w": [weights]} if weights else {}}

    def rollout(number: int) -> SimulatedRollout:
        return SimulatedRollout(described, fragment, sends=number < active)

    with TrainerStream("tcp://127.0.0.1:0", yields="fragments", sources=Sources(hosts, join_timeout=300.0)) as stream:
        assert isinstance(stream.address, wire.TcpAddress)
        with simulated(stream.address, hosts, rollout) as pipes:
            yield stream, pipes


class SimulatedRollout:
    """A rollout that sends one fragment over and over, as far as its window allows.

    sends    whether it does
    """

    def __init__(self, described: dict[str, Any], fragment: Any, *, sends: bool) -> None:
        self._described, self._fragment, self._sends = described, fragment, sends
        self._window = self._given = self._done = 0

    def hello(self) -> wire.Hello:
        """Its introduction."""
        return description_of(os.urandom(wire.SESSION_BYTES), self._described)

    def take(self, message: wire.Message) -> Iterator[wire.Message]:
        """The fragments for which there is room now."""
        match message:
            case wire.Settings():
                self._window = message.settings["window"]
            case wire.Done():
                self._done = message.number
        while self._sends and self._given < self._done + self._window:
            self._given += 1
            rest = self._fragment.rest | {"sequence": self._given - 1}
            yield wire.Fragment(0, self._given, self._fragment.columns, rest)


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
