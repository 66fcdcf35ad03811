"""Other hosts: what a round trip costs, many hosts on one gateway, a slow link, and whole rollouts there.

A round trip is from the moment when actions are handed to a lane to the moment when its rows have come; beside it, a
bare socket that echoes as many bytes, in a process of its own as well. With a link that takes 20 ms longer, four lanes
keep a host busy whose every step takes 8 ms of work; beside it, 125 steps a second. Whole rollouts on two hosts stand
beside the same in two worker processes, which hand them over in shared memory.

    python -m benchmarks.remote [--quick]
"""

import select
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from benchmarks.command import run
from benchmarks.envs import CountingEnv
from benchmarks.pairs import FULL, Record, Sizes, in_steady_state, in_turns, record, steps_per_s
from rollflow import Forward, RemoteEnvs, RemoteRollouts, Rollout
from rollflow.nodes import EnvHost, RolloutHost
from rollflow.nodes.env.environments import ONE_AGENT
from rollflow.nodes.env.remote.remote_environments import RemoteEnvironments

HOSTS, HOSTS_A_PROCESS = 200, 50
REQUEST_BYTES, ANSWER_BYTES = 64, 200  # of a step of one slot with four numbers
LINK_S, WORK_S, LANES = 20e-3, 8e-3, 4

_PROGRAM = """
import sys; sys.path[:] = {path!r}
from benchmarks.remote import {function} as main
main(*{arguments!r})
"""


def measure(sizes: Sizes, hosts: int = HOSTS) -> list[Record]:
    """A line for each."""
    return [*_round_trip(sizes), _many(sizes, hosts), _slow_link(sizes), _whole_rollouts(sizes)]


# Round trips


def _round_trip(sizes: Sizes) -> list[Record]:
    envs = RemoteEnvs.listen("tcp://127.0.0.1:0")
    with _process("host", str(envs.addresses[0]), 1), _process("echo", _free_port()) as port:
        node = RemoteEnvironments(envs, kind=ONE_AGENT, fragment_length=1 << 20)
        node.make_lanes(lookback=1)
        try:
            lane = _Lane(node)
            pairs = in_turns(lambda: lane.times(sizes.seconds), lambda: _echoes(port, sizes.seconds), sizes.rounds)
            told: dict[str, Any] = {"where": "remote", "aim": None, "beside_name": "a bare socket's echo"}
            return [
                record(f"round trip, {name} (per s)", 1, [(1 / mine[i], 1 / other[i]) for mine, other in pairs], **told)
                for i, name in enumerate(("median", "99th percentile"))
            ]
        finally:
            node.close()


class _Lane:
    """One lane of a node of its own, handed to and fro."""

    def __init__(self, node: RemoteEnvironments) -> None:
        self._node = node
        list(node.start())
        self._lane = self._next()

    def times(self, seconds: float) -> tuple[float, float]:
        """Median and 99th percentile of round trips, in seconds."""
        lane, taken = self._lane, []
        lane.batch = {"actions": np.zeros(1, np.int64)}
        until = time.perf_counter() + seconds
        while (began := time.perf_counter()) < until:
            lane.record_actions(lane.batch)
            self._node(lane)
            self._next()
            taken.append(time.perf_counter() - began)
        return float(np.median(taken)), float(np.percentile(taken, 99))

    def _next(self) -> Any:
        while True:
            for lane in self._node.completed():
                return lane
            select.select([self._node], [], [])


def _echoes(port: int, seconds: float) -> tuple[float, float]:
    taken = []
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        until = time.perf_counter() + seconds
        while (began := time.perf_counter()) < until:
            sock.sendall(bytes(REQUEST_BYTES))
            got = 0
            while got < ANSWER_BYTES:
                got += len(sock.recv(4096))
            taken.append(time.perf_counter() - began)
    return float(np.median(taken)), float(np.percentile(taken, 99))


def echo(port: int) -> None:
    """Answer every request with as many bytes as a host would."""
    with socket.create_server(("127.0.0.1", port)) as server:
        print("ready", flush=True)
        while True:
            sock, _ = server.accept()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with sock:
                while sock.recv(4096):
                    sock.sendall(bytes(ANSWER_BYTES))


# Many hosts


def _many(sizes: Sizes, hosts: int) -> Record:
    envs = RemoteEnvs.listen("tcp://127.0.0.1:0", hosts=hosts)
    counts = [min(HOSTS_A_PROCESS, hosts - first) for first in range(0, hosts, HOSTS_A_PROCESS)]
    with _processes([("host", (str(envs.addresses[0]), count)) for count in counts]):
        with Rollout(envs, fragment_length=32, prefetch=1, forward=Forward(max_batch=hosts), seed=0) as rollout:
            fragments = iter(rollout.fragments())
            for _ in range(2 * hosts):
                next(fragments)
            rates = [steps_per_s(lambda: next(fragments).num_steps, sizes.seconds) for _ in range(sizes.rounds)]
    rate = statistics.median(rates)
    told: dict[str, Any] = {"where": "remote", "beside": None, "ratio": None}
    return record(f"{hosts} hosts, one lane of one slot each", hosts, [(rate, rate)], aim=None, **told)


def host(address: str, count: int) -> None:
    """So many hosts in this process, each with an environment that does next to nothing."""
    hosts = [EnvHost(CountingEnv, name=f"host {number}") for number in range(count)]
    threads = [threading.Thread(target=each.connect, args=(address,)) for each in hosts]
    for thread in threads:
        thread.start()
    print("ready", flush=True)
    for thread in threads:
        thread.join()


# A slow link


def _slow_link(sizes: Sizes) -> Record:
    envs = RemoteEnvs.listen("tcp://127.0.0.1:0")
    port = _free_port()
    with _process("link", port, envs.addresses[0].port), _process("working_host", f"tcp://127.0.0.1:{port}"):
        with Rollout(envs, fragment_length=32, prefetch=1, seed=0) as rollout:
            fragments = iter(rollout.fragments())
            next(fragments)
            seconds = max(2.0, sizes.seconds)
            rates = [steps_per_s(lambda: next(fragments).num_steps, seconds) for _ in range(3 if sizes == FULL else 1)]
    pairs = [(rate, 1 / WORK_S) for rate in rates]
    return record(
        "a link of 20 ms, 4 lanes", LANES, pairs, aim=0.9, where="remote", beside_name="a host always at work"
    )


def working_host(address: str) -> None:
    """A host whose every step takes the processor for a while."""
    print("ready", flush=True)
    EnvHost(lambda: CountingEnv(WORK_S), num_envs=LANES, lanes=LANES).connect(address)


def link(port: int, target: int) -> None:
    """A proxy to another port that hands on what comes half of the link's time later, in both directions."""
    with socket.create_server(("127.0.0.1", port)) as server:
        print("ready", flush=True)
        while True:
            near, _ = server.accept()
            far = socket.create_connection(("127.0.0.1", target))
            for here, there in ((near, far), (far, near)):
                there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                _Delayed(here, there).start()


class _Delayed:
    """Hands on what comes at one socket to another, later."""

    def __init__(self, here: socket.socket, there: socket.socket) -> None:
        self._here, self._there = here, there
        self._waiting: deque[tuple[float, bytes]] = deque()
        self._came = threading.Semaphore(0)

    def start(self) -> None:
        """Do so, in two threads."""
        for work in (self._take, self._give):
            threading.Thread(target=work, daemon=True).start()

    def _take(self) -> None:
        while True:
            data = self._here.recv(1 << 16)
            self._waiting.append((time.perf_counter() + LINK_S / 2, data))
            self._came.release()
            if not data:
                return

    def _give(self) -> None:
        while True:
            self._came.acquire()
            due, data = self._waiting.popleft()
            time.sleep(max(0.0, due - time.perf_counter()))
            if not data:
                self._there.shutdown(socket.SHUT_WR)
                return
            self._there.sendall(data)


# Whole rollouts


def _whole_rollouts(sizes: Sizes) -> Record:
    told: dict[str, Any] = {"fragment_length": 128, "prefetch": 1, "seed": 0}

    def on_hosts() -> float:
        rollouts = RemoteRollouts.listen("tcp://127.0.0.1:0", hosts=2)
        address = str(rollouts.addresses[0])
        with _processes([("rollout_host", (address,))] * 2), Rollout(rollouts, **told) as rollout:
            return in_steady_state(rollout, sizes.seconds)

    def in_workers() -> float:
        with Rollout("CartPole-v1", num_envs=64, where="rollouts", workers=2, **told) as rollout:
            return in_steady_state(rollout, sizes.seconds)

    pairs = in_turns(on_hosts, in_workers, sizes.rounds)
    beside: dict[str, Any] = {"where": "remote", "beside_name": "the same in two worker processes"}
    return record("whole rollouts on 2 hosts, CartPole", 64, pairs, aim=None, **beside)


def rollout_host(address: str) -> None:
    """Whole rollouts of half of the environments."""
    print("ready", flush=True)
    torch.set_num_threads(1)
    with RolloutHost("CartPole-v1", num_envs=32) as host:
        host.connect(address)


# Processes


@contextmanager
def _process(function: str, *arguments: Any) -> Iterator[Any]:
    with _processes([(function, arguments)]):
        yield arguments[0]


@contextmanager
def _processes(wanted: list[tuple[str, tuple[Any, ...]]]) -> Iterator[None]:
    """Functions of this module, each in a process of its own, once all are ready; killed when it is left."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _PROGRAM.format(path=sys.path, function=function, arguments=arguments)],
            stdout=subprocess.PIPE,
        )
        for function, arguments in wanted
    ]
    try:
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()
        yield
    finally:
        for process in started:
            process.kill()
            process.communicate()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    run(measure)
