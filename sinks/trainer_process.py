"""A trainer in a process of its own, started by the rollout's."""

import inspect
import logging
import os
import pickle
import select
import signal
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Literal, Self

import anyio
import cloudpickle

from rollflow.nodes.given import check_numbers
from rollflow.nodes.workers.worker_process import CLOSE_TIMEOUT_S, WorkerProcess, core_count
from rollflow.sinks.trainer import parcel
from rollflow.sinks.trainer.own_folder import OwnFolder
from rollflow.sinks.trainer.process_main import Failed
from rollflow.sinks.trainer_stream import TrainerStream
from rollflow.stream.errors import RunError

logger = logging.getLogger(__name__)

_OF_STREAM = tuple(inspect.signature(TrainerStream).parameters)[1:]  # an address it has


class TrainerProcess:
    """Runs `train(stream, *args)` in a child process, with a `TrainerStream` that this process can feed.

        train, args    what to run, which comes there by cloudpickle
        stream         arguments of the `TrainerStream` beside its address
        transport      how fragments get there: "shm", through shared memory; "unix", by a socket
        linger         seconds that the trainer has to come to its end once the block is left; None: for ever

        address        for a `TrainerSink`, or `feed`, with `watch=trainer.watch`
        pid            of the child
        result         what `train` returned, once the block has been left

    `with TrainerProcess(...) as trainer:` leaves no process behind: when the block is left, the trainer's loop ends
    behind the last rollout that is there. A trainer that does not come to its end in `linger` seconds, or whose block
    raised, is terminated, and killed.

    Raises RunError with the traceback in its notes where `train` raises, or the process dies, when the block is left.
    """

    def __init__(
        self,
        train: Callable[..., object],
        *args: Any,
        stream: Mapping[str, Any] | None = None,
        transport: Literal["shm", "unix"] = "shm",
        linger: float | None = 60.0,
    ) -> None:
        check_numbers(linger=(linger, 0))
        if not callable(train):
            raise ValueError(f"train is {train!r:.100}, expected a function that is called as train(stream, *args)")
        if transport not in ("shm", "unix"):
            raise ValueError(f"transport is {transport!r}, expected 'shm' or 'unix'")
        if not isinstance(stream, Mapping | None):
            raise ValueError(f"stream is {stream!r:.100}, expected the arguments of a TrainerStream by their names")
        if unknown := [name for name in stream or () if name not in _OF_STREAM]:
            raise ValueError(f"stream has {unknown}, expected arguments of a TrainerStream among {list(_OF_STREAM)}")
        self._name = getattr(train, "__name__", repr(train))
        self._job = train, args, dict(stream or {})
        self._transport, self._linger = transport, linger
        self._worker: WorkerProcess | None = None
        self._has_told = False
        self._error: RunError | None = None
        self.result: Any = None
        self.address = ""
        self.pid = 0

    def __enter__(self) -> Self:
        if self._worker is not None:
            raise RunError("the trainer has been started: it runs once, make another one")
        function, args, options = self._job
        self._folder = OwnFolder()
        self.address = f"{self._transport}:{self._folder.path}/trainer"
        threads = None if "OMP_NUM_THREADS" in os.environ else core_count()
        try:
            job = cloudpickle.dumps((function, args, self.address, options, threads))
            self._worker = WorkerProcess("rollflow.sinks.trainer.process_main", 1)
        except BaseException:
            self._folder.close()
            raise
        self.pid = self._worker.pid
        with suppress(OSError):  # it is gone, which will be noticed
            parcel.send(self._sock, job)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        worker = self._started()
        try:
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)  # which is its goodbye
            if not self._hears(self._linger if error is None else 0.0):
                if error is None:
                    logger.warning("the trainer %s has not ended for %g s: it is terminated", self._name, self._linger)
                with suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGTERM)
            worker.has_ended(CLOSE_TIMEOUT_S)
        finally:
            worker.kill()
            self._folder.close()
        if error is None and self._error is not None:
            raise self._error

    async def watch(self) -> None:
        """Wait until the trainer has ended. Raises RunError where it has failed."""
        self._started()
        if not self._has_told:
            await anyio.wait_readable(self._sock)
        self.check()

    def check(self) -> None:
        """Raise RunError where the trainer has failed, by now."""
        self._started()
        self._hears(0.0)
        if self._error is not None:
            raise self._error

    # Inside

    @property
    def _sock(self) -> socket.socket:
        return self._started().sockets[0]

    def _started(self) -> WorkerProcess:
        if self._worker is None:
            raise RunError("the trainer has not been started, expected: with TrainerProcess(...) as trainer:")
        return self._worker

    def _hears(self, patience: float | None) -> bool:
        """Whether it has said how it ended, or ended without a word, within so many seconds."""
        if self._has_told:
            return True
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        if not poll.poll(None if patience is None else patience * 1e3):
            return False
        self._has_told = True
        try:
            told = parcel.receive(self._sock)
        except (EOFError, OSError):
            self._error = RunError(f"the trainer {self._name}, process {self.pid}, {self._started().ended()}")
            return True
        if isinstance(told, Failed):
            self._error = RunError(f"the trainer {self._name} has failed: {told.text}")
            self._error.add_note(f"in its process:\n{told.traceback}")
        else:
            self.result = pickle.loads(told.value)
        return True
