"""Pickled objects between a process and its own child; arrays are not copied into a message first.

A message is, as little-endian u64: the size of a pickle, the number of its buffers, their sizes; then the pickle, then
the buffers.
"""

import pickle
import socket
import struct
from typing import Any

import numpy as np


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
    head_size, count = struct.unpack("<2Q", _exactly(sock, 16))
    sizes = struct.unpack(f"<{count}Q", _exactly(sock, 8 * count))
    head = _exactly(sock, head_size)
    return pickle.loads(head, buffers=[_exactly(sock, size) for size in sizes])


def _exactly(sock: socket.socket, size: int) -> memoryview:
    """Wait for so many bytes. Raises EOFError where the other end is gone."""
    received = np.empty(size, np.uint8).data
    left = received
    while left:
        count = sock.recv_into(left)
        if not count:
            raise EOFError("the other end is gone")
        left = left[count:]
    return received
