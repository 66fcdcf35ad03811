"""From one process to another: batches of 64 KiB, 1 MiB and 32 MiB to a trainer, through shared memory and sockets.

A batch is three float32 arrays, 80, 15 and 5 per cent of its bytes. The other process has one that it sends again and
again; here every byte is summed. Ours go the whole way from a source to a `TrainerStream`, acknowledged one by one.
Beside shared memory stands a bare ring in it, with two semaphores; beside the sockets, a blocking one of the same kind
that is received from into arrays that are ready. Lines that stand for themselves: a copy in one process with its sum,
`multiprocessing.Queue`, tensors through torch's, and Ray's object store where Ray is installed. Four batches are under
way at most, or 2 MiB, wherever they go.

    python -m benchmarks.transport [--quick]
"""

import importlib.util
import multiprocessing
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import shared_memory
from typing import Any

import numpy as np
import torch
import torch.multiprocessing
from numpy.typing import NDArray

from benchmarks.command import run
from benchmarks.feeder import feed
from benchmarks.pairs import Record, Run, Sizes, in_turns, record, steps_per_s
from rollflow.sinks import TrainerStream

SIZES = {"64 KiB": 64 << 10, "1 MiB": 1 << 20, "32 MiB": 32 << 20}
AIMS = {"shm": 0.9, "unix": 1 / 1.2, "tcp": 1 / 1.2}
LEAST_DEPTH, UNDER_WAY = 4, 2 << 20  # batches that are under way at most, or so many bytes of them

Batch = dict[str, NDArray[np.float32]]
_RAY_IS_HERE = importlib.util.find_spec("ray") is not None
_SPAWN = multiprocessing.get_context("spawn")


def measure(sizes: Sizes, payloads: Mapping[str, int] = SIZES) -> list[Record]:
    """A line for every way and every size."""
    records = []
    for name, size in payloads.items():
        records += [_ours(scheme, name, size, sizes) for scheme in AIMS]
        records += [_alone(way, make, name, size, sizes) for way, make in _ALONE.items()]
        if _RAY_IS_HERE:
            records.append(_alone("Ray's store", _ray_store, name, size, sizes))
    if not _RAY_IS_HERE:
        print("Ray's object store: left out, Ray is not installed here", file=sys.stderr)
    return records


def payload(size: int) -> Batch:
    """So many bytes, in three arrays."""
    count = size // 4
    parts = int(count * 0.8), int(count * 0.15)
    rng = np.random.default_rng(0)
    columns = zip(("obs", "logits", "misc"), (*parts, count - sum(parts)), strict=True)
    return {column: rng.random(part, np.float32) for column, part in columns}


def _depth(size: int) -> int:
    """How many batches of this size are under way at most."""
    return max(LEAST_DEPTH, UNDER_WAY // size)


def _ours(scheme: str, name: str, size: int, sizes: Sizes) -> Record:
    beside = {"shm": _ring, "unix": _unix, "tcp": _tcp}[scheme]
    with ExitStack() as stack:
        mine, other = (_taking(stack.enter_context(way)) for way in (_stream(scheme, size), beside(size)))
        rates = [lambda one=one: steps_per_s(one, sizes.seconds) for one in (mine, other)]
        for rate in rates:
            rate()  # warm up
        pairs = in_turns(*rates, sizes.rounds)
    told = {"beside_name": {"shm": "a bare ring"}.get(scheme, "a bare socket"), "where": scheme}
    made = record(f"to a trainer, {name} (batches/s)", 1, pairs, aim=AIMS[scheme], **told)
    return made | {"mb_per_s": round(made["steps_per_s"] * size / 1e6)}


def _alone(way: str, make: Callable[[int], Any], name: str, size: int, sizes: Sizes) -> Record:
    with make(size) as batches:
        take = _taking(batches)
        steps_per_s(take, sizes.seconds / 2)
        rates = [steps_per_s(take, sizes.seconds) for _ in range(sizes.rounds)]
    told: dict[str, Any] = {"where": way, "beside": None, "ratio": None}
    made = record(f"beside, {name} (batches/s)", 1, [(rate, rate) for rate in rates], aim=None, **told)
    return made | {"mb_per_s": round(made["steps_per_s"] * size / 1e6)}


def _taking(batches: Iterator[Any]) -> Run:
    """Take a few batches, and sum every byte of them."""

    def take() -> int:
        for _ in range(LEAST_DEPTH):
            for column in next(batches).values():
                np.sum(column if isinstance(column, np.ndarray) else column.numpy())
        return LEAST_DEPTH

    return take


@contextmanager
def _producing(work: Callable[..., None], *arguments: Any) -> Iterator[None]:
    process = _SPAWN.Process(target=work, args=arguments, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


# Ours


@contextmanager
def _stream(scheme: str, size: int) -> Iterator[Iterator[Any]]:
    with tempfile.TemporaryDirectory() as folder:
        address = "tcp://127.0.0.1:0" if scheme == "tcp" else f"{scheme}:{folder}/trainer"
        with ExitStack() as after, TrainerStream(address, prefetch=_depth(size) - 1, join_timeout=20.0) as stream:
            after.enter_context(_producing(feed_payload, str(stream.address), size))
            yield iter(stream)


def feed_payload(address: str, size: int) -> None:
    """In the other process."""
    feed(address, payload(size))


# Bare


@contextmanager
def _ring(size: int) -> Iterator[Iterator[Batch]]:
    memory = shared_memory.SharedMemory(create=True, size=size * _depth(size))
    free, full = _SPAWN.Semaphore(_depth(size)), _SPAWN.Semaphore(0)

    def batches() -> Iterator[Batch]:
        slots = _slots(memory, size)
        while True:
            for slot in slots:
                full.acquire()
                yield slot
                free.release()

    taken = batches()
    try:
        with _producing(fill_ring, memory.name, size, free, full):
            yield taken
    finally:
        taken.close()
        memory.unlink()


def fill_ring(name: str, size: int, free: Any, full: Any) -> None:
    """In the other process."""
    source = payload(size)
    memory = shared_memory.SharedMemory(name=name)
    slots = _slots(memory, size)
    while True:
        for slot in slots:
            free.acquire()
            for column, values in source.items():
                np.copyto(slot[column], values)
            full.release()


def _slots(memory: shared_memory.SharedMemory, size: int) -> list[Batch]:
    slots, offset = [], 0
    for _ in range(_depth(size)):
        slot: Batch = {}
        for column, values in payload(size).items():
            slot[column] = np.ndarray(values.shape, values.dtype, memory.buf, offset)
            offset += values.nbytes
        slots.append(slot)
    return slots


@contextmanager
def _unix(size: int) -> Iterator[Iterator[Batch]]:
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{folder}/bare")
        server.listen()
        with _received(server, size) as batches:
            yield batches


@contextmanager
def _tcp(size: int) -> Iterator[Iterator[Batch]]:
    with socket.create_server(("127.0.0.1", 0)) as server, _received(server, size) as batches:
        yield batches


@contextmanager
def _received(server: socket.socket, size: int) -> Iterator[Iterator[Batch]]:
    with _producing(send_bare, server.family, server.getsockname(), size):
        sock, _ = server.accept()
        with sock:
            yield _batches_from(sock, size)


def _batches_from(sock: socket.socket, size: int) -> Iterator[Batch]:
    batch = payload(size)
    views = [memoryview(values).cast("B") for values in batch.values()]
    while True:
        for view in views:
            got = 0
            while got < len(view):
                got += sock.recv_into(view[got:])
        yield batch


def send_bare(family: int, address: Any, size: int) -> None:
    """In the other process."""
    source = payload(size)
    with suppress(ConnectionError), socket.socket(family) as sock:  # the other end has seen enough
        sock.connect(address)
        while True:
            for values in source.values():
                sock.sendall(values.data.cast("B"))


@contextmanager
def _copied(size: int) -> Iterator[Iterator[Batch]]:
    def batches() -> Iterator[Batch]:
        source, copy = payload(size), payload(size)
        while True:
            for column, values in source.items():
                np.copyto(copy[column], values)
            yield copy

    yield batches()


@contextmanager
def _queue(size: int) -> Iterator[Iterator[Batch]]:
    queue = _SPAWN.Queue(_depth(size))
    with _producing(put_arrays, queue, size):
        yield iter(queue.get, None)


def put_arrays(queue: Any, size: int) -> None:
    """In the other process."""
    source = payload(size)
    while True:
        queue.put(source)


@contextmanager
def _torch_queue(size: int) -> Iterator[Iterator[Any]]:
    queue = torch.multiprocessing.get_context("spawn").Queue(_depth(size))
    with _producing(put_tensors, queue, size):
        yield iter(queue.get, None)


def put_tensors(queue: Any, size: int) -> None:
    """In the other process: new tensors for every batch, as somebody has who hands them over."""
    torch.set_num_threads(1)
    source = {column: torch.from_numpy(values) for column, values in payload(size).items()}
    while True:
        queue.put({column: values.clone().share_memory_() for column, values in source.items()})


@contextmanager
def _ray_store(size: int) -> Iterator[Iterator[Any]]:
    from benchmarks.peers.ray_store import batches

    with batches(payload(size), _depth(size)) as taken:
        yield taken


_ALONE = {"copied here": _copied, "mp.Queue": _queue, "torch's queue": _torch_queue}


if __name__ == "__main__":
    run(measure)
