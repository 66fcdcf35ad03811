"""A trainer's process: what runs in it."""

import pickle
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import cloudpickle
import torch

from rollflow.nodes.workers.lane_server import end_with_parent
from rollflow.sinks.trainer import parcel
from rollflow.sinks.trainer_stream import TrainerStream


class Job(NamedTuple):
    """What a trainer's process is to do.

    function, args      called with the stream and these
    address, options    of the stream
    threads             of torch; None: as many as it has
    """

    function: Callable[..., object]
    args: tuple[Any, ...]
    address: str
    options: Mapping[str, Any]
    threads: int | None


class Failed(NamedTuple):
    """What was raised."""

    text: str
    traceback: str


class Returned(NamedTuple):
    """What was returned, pickled."""

    value: bytes


def main(life: int, sockets: Sequence[int]) -> None:
    """Do the job that comes by the socket, and say how it ended, for as long as the pipe `life` is open."""
    end_with_parent(life)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that blocks are left
    told: Returned | Failed
    with socket.socket(fileno=sockets[0]) as sock:
        try:
            told = Returned(cloudpickle.dumps(_do(Job(*pickle.loads(parcel.receive(sock))), sock)))
        except Exception as error:
            told = Failed(f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)))
        parcel.send(sock, told)


def _do(job: Job, sock: socket.socket) -> object:
    if job.threads is not None:
        torch.set_num_threads(job.threads)
    with TrainerStream(job.address, **job.options) as stream:
        lock, has_left = threading.Lock(), False

        def listen() -> None:
            sock.recv(1)  # nothing comes but the end
            with lock:
                if not has_left:
                    stream.expect_no_more()

        threading.Thread(target=listen, daemon=True).start()
        try:
            return job.function(stream, *job.args)
        finally:
            with lock:
                has_left = True
