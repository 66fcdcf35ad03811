"""From one process to another: train batches and fragments of 64 KiB, 1 MiB and 32 MiB to a trainer.

A batch is three float32 arrays, 80, 15 and 5 per cent of its bytes; a fragment has the columns of 64 slots and 16
vector steps. The other process has some that it sends again and again; here every byte is summed. Ours go the whole way
from a source to a `TrainerStream`, acknowledged one by one. Through shared memory a batch is copied once, and a
fragment lies where its environments wrote it. Beside it stands a bare ring in shared memory, with two semaphores, that
the same arrays are copied into; beside the sockets, a blocking one of the same kind that is received from into arrays
that are ready. Lines that stand for themselves: a copy in one process with its sum; the ring with new tensors over each
batch and word of when they are gone, as anything needs whose batches may be kept; `multiprocessing.Queue` and tensors
through torch's, of a fragment its columns alone; `multiprocessing.Queue` with whole fragments; Ray's object store where
Ray is installed. Four are under way at most, or 2 MiB, wherever they go.

    python -m benchmarks.transport [--quick]
"""

import importlib.util
import multiprocessing
import socket
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from multiprocessing import shared_memory
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.multiprocessing
from numpy.typing import NDArray

from benchmarks.command import run
from benchmarks.feeder import feed_batch, feed_fragments, rollout_of
from benchmarks.pairs import Record, Run, Sizes, in_turns, record, steps_per_s
from rollflow import TrainerStream
from rollflow.stream.fragments.fragment import Fragment

SIZES = {"64 KiB": 64 << 10, "1 MiB": 1 << 20, "32 MiB": 32 << 20}
AIMS = {"shm": 0.9, "unix": 1 / 1.2, "tcp": 1 / 1.2}
LEAST_DEPTH, UNDER_WAY = 4, 2 << 20  # batches that are under way at most, or so many bytes of them

Arrays = dict[str, NDArray[Any]]
_RAY_IS_HERE = importlib.util.find_spec("ray") is not None
_SPAWN = multiprocessing.get_context("spawn")


class Load(NamedTuple):
    """What is sent: train batches or fragments of so many bytes."""

    is_fragment: bool
    size: int

    @property
    def what(self) -> str:
        """What they are called."""
        return "fragments" if self.is_fragment else "batches"

    @property
    def depth(self) -> int:
        """How many are under way at most."""
        return max(LEAST_DEPTH, UNDER_WAY // self.size)

    def arrays(self) -> Arrays:
        """What one is made of."""
        if self.is_fragment:
            with rollout_of(self.size) as rollout:
                columns = next(iter(rollout.fragments())).columns
                return {name: np.array(column.tree) for name, column in columns.items()}
        count = self.size // 4
        parts = int(count * 0.8), int(count * 0.15)
        rng = np.random.default_rng(0)
        columns = zip(("obs", "logits", "misc"), (*parts, count - sum(parts)), strict=True)
        return {column: rng.random(part, np.float32) for column, part in columns}


def measure(sizes: Sizes, payloads: Mapping[str, int] = SIZES, schemes: Iterable[str] = AIMS) -> list[Record]:
    """A line for every way and every size.

    schemes    of the addresses of a trainer
    """
    records = []
    for name, size in payloads.items():
        for load in (Load(False, size), Load(True, size)):
            records += [_ours(scheme, name, load, sizes) for scheme in schemes]
            ways = _OF_FRAGMENTS if load.is_fragment else _ALONE
            records += [_alone(way, make, name, load, sizes) for way, make in ways.items()]
        if _RAY_IS_HERE:
            records.append(_alone("Ray's store", _ray_store, name, Load(False, size), sizes))
    if not _RAY_IS_HERE:
        print("Ray's object store: left out, Ray is not installed here", file=sys.stderr)
    return records


def _ours(scheme: str, name: str, load: Load, sizes: Sizes) -> Record:
    beside = {"shm": _ring, "unix": _unix, "tcp": _tcp}[scheme]
    with ExitStack() as stack:
        mine, other = (_taking(stack.enter_context(way)) for way in (_stream(scheme, load), beside(load)))
        rates = [lambda one=one: steps_per_s(one, sizes.seconds) for one in (mine, other)]
        for rate in rates:
            rate()  # warm up
        pairs = in_turns(*rates, sizes.rounds)
    told = {"beside_name": {"shm": "a bare ring"}.get(scheme, "a bare socket"), "where": scheme}
    made = record(f"to a trainer, {name} ({load.what}/s)", 1, pairs, aim=AIMS[scheme], **told)
    return made | {"mb_per_s": round(made["steps_per_s"] * load.size / 1e6)}


def _alone(way: str, make: Callable[[Load], Any], name: str, load: Load, sizes: Sizes) -> Record:
    with make(load) as batches:
        take = _taking(batches)
        steps_per_s(take, sizes.seconds / 2)
        rates = [steps_per_s(take, sizes.seconds) for _ in range(sizes.rounds)]
    told: dict[str, Any] = {"where": way, "beside": None, "ratio": None}
    made = record(f"beside, {name} ({load.what}/s)", 1, [(rate, rate) for rate in rates], aim=None, **told)
    return made | {"mb_per_s": round(made["steps_per_s"] * load.size / 1e6)}


def _taking(batches: Iterator[Any]) -> Run:
    """Take a few batches or fragments, and sum every byte of them."""

    def take() -> int:
        for _ in range(LEAST_DEPTH):
            for array in _arrays_of(next(batches)):
                np.sum(array)
        return LEAST_DEPTH

    return take


def _arrays_of(item: Any) -> Iterator[NDArray[Any]]:
    if isinstance(item, Fragment):
        for column in item.columns.values():
            yield column.tree
        return
    for column in item.values():
        yield column if isinstance(column, np.ndarray) else column.numpy()


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
def _stream(scheme: str, load: Load) -> Iterator[Iterator[Any]]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as after:
        address = "tcp://127.0.0.1:0" if scheme == "tcp" else f"{scheme}:{folder}/trainer"
        yields: Any = "fragments" if load.is_fragment else "batches"
        made = TrainerStream(address, yields=yields, prefetch=load.depth - 1)
        with after, made as stream:
            after.enter_context(_producing(feed_load, str(stream.address), load))
            yield iter(stream)


def feed_load(address: str, load: Load) -> None:
    """In the other process."""
    if load.is_fragment:
        feed_fragments(address, load.size)
    else:
        feed_batch(address, load.arrays())


# Bare


@contextmanager
def _ring(load: Load) -> Iterator[Iterator[Arrays]]:
    source = load.arrays()
    memory = shared_memory.SharedMemory(create=True, size=load.depth * sum(map(_room, source.values())))
    free, full = _SPAWN.Semaphore(load.depth), _SPAWN.Semaphore(0)

    def batches() -> Iterator[Arrays]:
        slots = _slots(memory.buf, source, load.depth)
        while True:
            for slot in slots:
                full.acquire()
                yield slot
                free.release()

    taken = batches()
    try:
        with _producing(fill_ring, memory.name, load, free, full):
            yield taken
    finally:
        taken.close()
        memory.unlink()


def fill_ring(name: str, load: Load, free: Any, full: Any) -> None:
    """In the other process."""
    source = load.arrays()
    memory = shared_memory.SharedMemory(name=name)
    slots = _slots(memory.buf, source, load.depth)
    while True:
        for slot in slots:
            free.acquire()
            for column, values in source.items():
                np.copyto(slot[column], values)
            full.release()


def _slots(buffer: memoryview, source: Arrays, depth: int) -> list[Arrays]:
    slots, offset = [], 0
    for _ in range(depth):
        slot: Arrays = {}
        for column, values in source.items():
            slot[column] = np.ndarray(values.shape, values.dtype, buffer, offset)
            offset += _room(values)
        slots.append(slot)
    return slots


def _room(array: NDArray[Any]) -> int:
    return array.nbytes + -array.nbytes % 8


@contextmanager
def _unix(load: Load) -> Iterator[Iterator[Arrays]]:
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{folder}/bare")
        server.listen()
        with _received(server, load) as batches:
            yield batches


@contextmanager
def _tcp(load: Load) -> Iterator[Iterator[Arrays]]:
    with socket.create_server(("127.0.0.1", 0)) as server, _received(server, load) as batches:
        yield batches


@contextmanager
def _received(server: socket.socket, load: Load) -> Iterator[Iterator[Arrays]]:
    with _producing(send_bare, server.family, server.getsockname(), load):
        sock, _ = server.accept()
        with sock:
            yield _batches_from(sock, load)


def _batches_from(sock: socket.socket, load: Load) -> Iterator[Arrays]:
    buffer, batch = _in_one(load)
    while True:
        got = 0
        while got < len(buffer):
            got += sock.recv_into(buffer[got:])
        yield batch


def send_bare(family: int, address: Any, load: Load) -> None:
    """In the other process."""
    buffer, _ = _in_one(load)
    with suppress(ConnectionError), socket.socket(family) as sock:  # the other end has seen enough
        sock.connect(address)
        while True:
            sock.sendall(buffer)


def _in_one(load: Load) -> tuple[memoryview, Arrays]:
    """Arrays one behind the other, and the memory that they are in."""
    source = load.arrays()
    buffer = memoryview(bytearray(sum(map(_room, source.values()))))
    (arrays,) = _slots(buffer, source, 1)
    for column, values in source.items():
        np.copyto(arrays[column], values)
    return buffer, arrays


@contextmanager
def _copied(load: Load) -> Iterator[Iterator[Arrays]]:
    def batches() -> Iterator[Arrays]:
        source, copy = load.arrays(), load.arrays()
        while True:
            for column, values in source.items():
                np.copyto(copy[column], values)
            yield copy

    yield batches()


@contextmanager
def _ring_of_tensors(load: Load) -> Iterator[Iterator[Any]]:
    def gone() -> None:
        """Told for every batch."""

    def tensors_of(slot: Arrays) -> dict[str, torch.Tensor]:
        views = {column: values.view() for column, values in slot.items()}
        weakref.finalize(views["obs"], gone).atexit = False
        return {column: torch.from_numpy(view) for column, view in views.items()}

    with _ring(load) as batches:
        yield map(tensors_of, batches)


@contextmanager
def _queue(put: Callable[[Any, Load], None], load: Load) -> Iterator[Iterator[Any]]:
    queue = _SPAWN.Queue(load.depth)
    with _producing(put, queue, load):
        yield iter(queue.get, None)


def put_arrays(queue: Any, load: Load) -> None:
    """In the other process."""
    source = load.arrays()
    while True:
        queue.put(source)


def put_fragments(queue: Any, load: Load) -> None:
    """In the other process."""
    with rollout_of(load.size) as rollout:
        fragments = list(rollout.fragments())
    while True:
        for fragment in fragments:
            queue.put(fragment)


@contextmanager
def _torch_queue(load: Load) -> Iterator[Iterator[Any]]:
    queue = torch.multiprocessing.get_context("spawn").Queue(load.depth)
    with _producing(put_tensors, queue, load):
        yield iter(queue.get, None)


def put_tensors(queue: Any, load: Load) -> None:
    """In the other process: new tensors for every batch, as somebody has who hands them over."""
    torch.set_num_threads(1)
    source = {column: torch.from_numpy(values) for column, values in load.arrays().items()}
    while True:
        queue.put({column: values.clone().share_memory_() for column, values in source.items()})


@contextmanager
def _ray_store(load: Load) -> Iterator[Iterator[Any]]:
    from benchmarks.peers.ray_store import batches

    with batches(load.arrays(), load.depth) as taken:
        yield taken


_QUEUES = {"mp.Queue": partial(_queue, put_arrays), "torch's queue": _torch_queue}
_OF_FRAGMENTS = _QUEUES | {"mp.Queue, whole": partial(_queue, put_fragments)}
_ALONE = {"copied here": _copied, "ring, new tensors": _ring_of_tensors} | _QUEUES


if __name__ == "__main__":
    run(measure)
