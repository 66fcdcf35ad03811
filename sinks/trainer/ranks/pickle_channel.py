"""Pickled objects between processes of one user on this machine; arrays are not copied into a message first.

A message is, as little-endian u64: the size of a pickle, the number of its buffers, their sizes; then the pickle, then
the buffers. A pickle may run any code, so a receiver calls `check_same_user` first.
"""

import os
import pickle
import socket
import struct
from typing import Any

import numpy as np

from rollflow.stream.data.errors import RunError

_PEER = struct.Struct("3i")  # process, user, group


def send(sock: socket.socket, item: Any) -> None:
    """Send an object. Raises OSError where the other end is gone."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(item, protocol=5, buffer_callback=buffers.append)
    raw = [buffer.raw() for buffer in buffers]
    sizes = [len(head), len(raw), *(view.nbytes for view in raw)]
    sock.sendall(struct.pack(f"<{len(sizes)}Q", *sizes))
    sock.sendall(head)
    for view in raw:
        sock.sendall(view)


def receive(sock: socket.socket) -> Any:
    """Wait for an object. Raises EOFError where the other end is gone."""
    head_size, count = struct.unpack("<2Q", receive_exactly(sock, 16))
    sizes = struct.unpack(f"<{count}Q", receive_exactly(sock, 8 * count))
    head = receive_exactly(sock, head_size)
    return pickle.loads(head, buffers=[receive_exactly(sock, size) for size in sizes])


def receive_exactly(sock: socket.socket, size: int) -> memoryview:
    """Wait for so many bytes. Raises EOFError where the other end is gone."""
    received = np.empty(size, np.uint8).data
    left = received
    while left:
        count = sock.recv_into(left)
        if not count:
            raise EOFError("the other end is gone")
        left = left[count:]
    return received


def check_same_user(sock: socket.socket, where: str) -> None:
    """Raise RunError if the other end of a Unix socket is another user's; some systems don't tell."""
    if not hasattr(socket, "SO_PEERCRED"):
        return
    _, user, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if user != os.getuid():
        raise RunError(f"{where} is another user's, {user}, expected {os.getuid()}")
