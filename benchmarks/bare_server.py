"""A bare msgpack server of a policy's forward pass over TCP: what serving by rollflow's protocol is held against."""

import contextlib
import select
import socket
import threading
from typing import Any, Self

import msgpack
import numpy as np

from benchmarks.serving_parts import sampled


class BareServer:
    """Answers frames of a length and msgpack, in one thread, without a handshake, sessions or checks.

    together    True: one forward pass for all requests that are there; False: one for each
    """

    def __init__(self, module: Any, *, together: bool) -> None:
        self._module, self._together = module, together
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._ending, self._ended = socket.socketpair()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.close()
        self._thread.join()
        self._listener.close()
        self._ended.close()

    def _run(self) -> None:
        poll = select.epoll()
        sockets: dict[int, socket.socket] = {}
        parts: dict[int, bytes] = {}
        poll.register(self._listener.fileno(), select.EPOLLIN)
        poll.register(self._ended.fileno(), select.EPOLLIN)
        while True:
            requests: list[tuple[socket.socket, dict[str, Any]]] = []
            for fd, _ in poll.poll():
                if fd == self._ended.fileno():
                    return
                if fd == self._listener.fileno():
                    sock, _ = self._listener.accept()
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    sockets[sock.fileno()], parts[sock.fileno()] = sock, b""
                    poll.register(sock.fileno(), select.EPOLLIN)
                    continue
                try:
                    data = sockets[fd].recv(1 << 16)
                except ConnectionError:  # a client has ended
                    data = b""
                if not data:
                    poll.unregister(fd)
                    sockets.pop(fd).close()
                    continue
                frame = parts[fd] + data
                end = 4 + int.from_bytes(frame[:4], "little")
                if len(frame) < 4 or len(frame) < end:
                    parts[fd] = frame
                    continue
                parts[fd] = frame[end:]
                requests.append((sockets[fd], msgpack.unpackb(frame[4:end])))
                if not self._together:
                    self._answer(requests)
                    requests = []
            if requests:
                self._answer(requests)

    def _answer(self, requests: list[tuple[socket.socket, dict[str, Any]]]) -> None:
        observations = np.stack([np.frombuffer(request["obs"], np.float32) for _, request in requests])
        actions = sampled(self._module, observations)
        for (sock, request), action in zip(requests, actions, strict=True):
            fields = {"kind": "acted", "number": request["number"], "places": [0], "versions": ["1"], "weights": [0]}
            packed = msgpack.packb({**fields, "actions": action.tobytes()})
            with contextlib.suppress(ConnectionError):
                sock.sendall(len(packed).to_bytes(4, "little") + packed)
