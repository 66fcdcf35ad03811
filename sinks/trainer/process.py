"""Trainer in a child process of the rollout's."""

import inspect
import logging
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Self

import anyio
import cloudpickle
import torch

from rollflow.nodes.argument_checks import check_keywords, check_numbers, checking_keywords
from rollflow.nodes.env.workers.worker_process import WorkerProcess, core_count, end_with_parent
from rollflow.sinks.trainer.stream import PLACES, TrainerStream
from rollflow.stream.data.errors import RunError, shown
from rollflow.stream.net import backoff

logger = logging.getLogger(__name__)

_STREAM_OPTIONS = tuple(inspect.signature(TrainerStream).parameters)[1:]  # all but the address
_PLACES = PLACES | {name: f"{name}=…" for name in _STREAM_OPTIONS}


class TrainerProcess:
    """Runs `train(stream, *args)` in a child process, with a `TrainerStream` that this process can feed.

        train, args    function and its arguments, sent to the child by cloudpickle
        stream         arguments of the `TrainerStream` by their names, but for its address
        linger         seconds that the trainer has to come to its end once the block is left; None: for ever

        address        for a `TrainerSink`, or `feed`, with `watch=trainer.watch`
        pid            of the child
        result         value that `train` returned, once the block has been left

    `with TrainerProcess(...) as trainer:` leaves no process behind. When the block is left, the trainer's loop ends
    after the last rollout that is there. A trainer that does not end within `linger` seconds, or whose block raised, is
    terminated, and then killed. Fragments come to it through shared memory.

    Raises RunError with the traceback in its notes if `train` raises, or the process dies, when the block is left.
    """

    @checking_keywords("TrainerProcess", {name: f"stream=dict({place})" for name, place in _PLACES.items()})
    def __init__(
        self,
        train: Callable[..., object],
        *args: Any,
        stream: Mapping[str, Any] | None = None,
        linger: float | None = 60.0,
    ) -> None:
        check_numbers(linger=(linger, 0))
        if not callable(train):
            raise ValueError(f"train is {shown(train)}, expected a function that is called as train(stream, *args)")
        if not isinstance(stream, Mapping | None):
            raise ValueError(f"stream is {shown(stream)}, expected the arguments of a TrainerStream by their names")
        check_keywords("TrainerStream", stream or (), _STREAM_OPTIONS, PLACES | {"address": "none, for it has its own"})
        self._name = getattr(train, "__name__", repr(train))
        self._job = train, args, dict(stream or {})
        self._linger = linger
        self._worker: WorkerProcess | None = None
        self._has_ended = False
        self._error: RunError | None = None
        self.result: Any = None
        self.address = ""
        self.pid = 0

    def __enter__(self) -> Self:
        if self._worker is not None:
            raise RunError("the trainer has been started: it runs once, make another one")
        function, args, options = self._job
        self._folder = tempfile.mkdtemp(prefix="rollflow-")
        self.address = f"shm:{self._folder}/trainer"
        threads = None if "OMP_NUM_THREADS" in os.environ else core_count()  # None: torch's default
        try:
            job = cloudpickle.dumps((function, args, self.address, options, threads))
            self._worker = WorkerProcess("rollflow.sinks.trainer.process", 1)
            self._link = Connection(self._worker.sockets[0].detach())
            self.pid = self._worker.pid
            with suppress(OSError):  # the child is gone, which `watch` and `__exit__` notice
                self._link.send_bytes(job)
        except BaseException:
            if self._worker is not None:
                self._worker.kill()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        worker = self._started()
        try:
            with suppress(OSError):
                self._link.send_bytes(b"")  # the child's sign that no more rollouts come
            if not self._receive(self._linger if error is None else 0.0):
                if error is None:
                    logger.warning("the trainer %s has not ended for %g s: it is terminated", self._name, self._linger)
                with suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGTERM)
            worker.has_ended(backoff.times.close_s)
        finally:
            worker.kill()
            self._has_ended = True
            self._link.close()
            shutil.rmtree(self._folder, ignore_errors=True)
        if error is None and self._error is not None:
            raise self._error

    async def watch(self) -> None:
        """Wait until the trainer has ended. Raises RunError if it has failed."""
        self._started()
        if not self._has_ended:
            await anyio.wait_readable(self._link.fileno())
        self.check()

    def check(self) -> None:
        """Raise RunError if the trainer has failed by now."""
        self._started()
        self._receive(0.0)
        if self._error is not None:
            raise self._error

    # Inside

    def _started(self) -> WorkerProcess:
        if self._worker is None:
            raise RunError("the trainer has not been started, expected: with TrainerProcess(...) as trainer:")
        return self._worker

    def _receive(self, timeout_s: float | None) -> bool:
        """Receive the child's result or failure; False if it has not ended within so many seconds, None: for ever."""
        if self._has_ended:
            return True
        if not self._link.poll(timeout_s):
            return False
        self._has_ended = True
        try:
            outcome = self._link.recv()
        except (EOFError, OSError, pickle.UnpicklingError):
            self._error = RunError(f"the trainer {self._name}, process {self.pid}, {self._started().ended()}")
            return True
        if isinstance(outcome, tuple):
            text, traceback = outcome
            self._error = RunError(f"the trainer {self._name} has failed: {text}")
            self._error.add_note(f"in its process:\n{traceback}")
        else:
            self.result = pickle.loads(outcome)
        return True


def main(life: int, sockets: Sequence[int]) -> None:
    """Run the job that comes by the socket, and send its pickled result; the process ends when `life` is closed.

    life       descriptor of a pipe
    sockets    one descriptor, of the socket to the parent
    """
    end_with_parent(life)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that blocks are left
    outcome: bytes | tuple[str, str]  # the result, or an error and its traceback as text
    with Connection(sockets[0]) as link:
        try:
            outcome = cloudpickle.dumps(_run(link, *pickle.loads(link.recv_bytes())))
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))
        link.send(outcome)


def _run(
    link: "Connection[Any, Any]",
    function: Callable[..., object],
    args: tuple[Any, ...],
    address: str,
    options: dict[str, Any],
    threads: int | None,
) -> object:
    """Call `function(stream, *args)` with torch's number of threads; what comes by `link` says that no rollouts do."""
    if threads is not None:
        torch.set_num_threads(threads)
    with TrainerStream(address, **options) as stream:
        lock, has_left = threading.Lock(), False

        def listen() -> None:
            with suppress(EOFError, OSError):
                link.recv_bytes()
            with lock:
                if not has_left:
                    stream.expect_no_more()

        threading.Thread(target=listen, daemon=True).start()
        try:
            return function(stream, *args)
        finally:
            with lock:
                has_left = True
