"""Clients over TCP in a closed loop, in a process of their own: each asks again when it has its answer.

    python -m benchmarks.tcp_clients PORT {rollflow,bare} CLIENTS SECONDS

It prints one line of JSON, as `benchmarks.http_clients` does. Requests are made beforehand, and of an answer its length
alone is read, so that both servers have the same clients.
"""

import json
import secrets
import select
import socket
import sys
from collections.abc import Iterator
from time import monotonic, perf_counter

import msgpack
import numpy as np

from rollflow.stream import wire

OBSERVATION = np.array([[0.01, -0.02, 0.03, -0.04]], np.float32)
MOST_REQUESTS = 5000  # of one client
WARM_UP_S = 0.5


def main(port: int, protocol: str, clients: int, seconds: float) -> None:
    """Ask for so many seconds, behind a warm-up, and print what came out."""
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(clients)]
    if protocol == "rollflow":
        for each in sockets:
            _greet(each)
        requests = [_of_rollflow(number) for number in range(2, MOST_REQUESTS)]
    else:
        requests = [_bare(number) for number in range(2, MOST_REQUESTS)]
    took = _asked(sockets, requests, seconds)
    median, late = (float(each) * 1e3 for each in np.percentile(took, [50, 99]))
    print(json.dumps({"answers_per_s": len(took) / seconds, "median_ms": median, "p99_ms": late}))


def _asked(sockets: list[socket.socket], requests: list[bytes], seconds: float) -> list[float]:
    poll, took = select.epoll(), []
    ways: dict[int, tuple[socket.socket, Iterator[bytes]]] = {}
    began, parts = {}, {}
    first = perf_counter() + WARM_UP_S
    last = first + seconds
    for each in sockets:
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ways[each.fileno()] = each, iter(requests)
        poll.register(each.fileno(), select.EPOLLIN)
        began[each.fileno()], parts[each.fileno()] = perf_counter(), b""
        each.sendall(next(ways[each.fileno()][1]))
    while perf_counter() < last or not took:
        for fd, _ in poll.poll():
            sock, mine = ways[fd]
            answer = parts[fd] + sock.recv(1 << 16)
            if len(answer) < 4 or len(answer) < 4 + int.from_bytes(answer[:4], "little"):
                parts[fd] = answer
                continue
            ended = perf_counter()
            if began[fd] >= first:
                took.append(ended - began[fd])
            parts[fd], began[fd] = answer[4 + int.from_bytes(answer[:4], "little") :], ended
            sock.sendall(next(mine))
    return took


def _greet(sock: socket.socket) -> None:
    """Shake hands with a `PolicyServer`, and see that it acts."""
    session = wire.ClientSession(secrets.token_bytes(wire.SESSION_BYTES))
    hello = wire.Hello(
        versions=(wire.VERSION, wire.VERSION),
        role="client",
        software="benchmarks",
        name="client",
        nonce=secrets.token_bytes(wire.NONCE_BYTES),
        session=session.token,
        max_frame=1 << 20,
        slots=(1,),
        observation_space={},
        action_space={},
        autoreset="DISABLED",
        metadata={},
    )
    connection = wire.ClientConnection(hello, session, secret=None, limits=wire.Limits(), now=monotonic())
    is_told = False
    while True:
        for buffer in connection.outgoing():
            sock.sendall(buffer)
        for event in connection.receive(sock.recv(1 << 16), monotonic()):
            if isinstance(event, wire.Settings):
                is_told = True
            elif isinstance(event, wire.Acted):
                if event.refused:
                    raise RuntimeError(f"the server refuses: {event.refused}")
                return
            elif not isinstance(event, wire.Welcome):
                raise RuntimeError(f"the server says {event}")
        if is_told and session.number == 0:
            connection.ask(_act(1))


def _act(number: int) -> wire.Act:
    return wire.Act(number, number - 1, "mlp", None, (None,), np.array([True]), None, OBSERVATION)


def _of_rollflow(number: int) -> bytes:
    return b"".join(map(bytes, wire.encode(_act(number))))


def _bare(number: int) -> bytes:
    begins, obs = np.array([True]).tobytes(), OBSERVATION.tobytes()
    fields = {"kind": "act", "number": number, "done": number - 1, "policy": "mlp", "sessions": [None]}
    packed = msgpack.packb({**fields, "begins": begins, "obs": obs})
    return len(packed).to_bytes(4, "little") + bytes(packed)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
