"""A program of this installation in a process of its own, and what it has written last."""

import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Mapping, Sequence

from rollflow.nodes.env.workers.worker_process import WorkerProcess

_MOST_BYTES = 1 << 14  # of what it has written
_LAST_BYTES_S = 1.0  # until what a process wrote before its end has been read


class ProgramProcess:
    """Runs a program in a process that ends when this one does, whatever ends it.

        command      name of a program, and its arguments
        variables    added to its environment
        preload      module that takes long to import: see `WorkerProcess`

    The command does not stand on the process's command line. Raises RunError in a worker process.
    """

    def __init__(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        preload: str | None = None,
    ) -> None:
        self._worker = WorkerProcess("rollflow.nodes.launch.program", 2, preload=preload)
        orders, written = self._worker.sockets
        self._end: str | None = None
        self._written = bytearray()
        self._source = written.dup()  # read by another thread: the worker's is closed under its hands
        self._reader = threading.Thread(target=self._read, name="rollflow program", daemon=True)
        self._reader.start()
        with contextlib.suppress(OSError):  # it has ended already, which `end` says
            order = {"command": list(command), "variables": dict(variables)}
            orders.sendall(json.dumps(order).encode() + b"\n")

    @property
    def end(self) -> str | None:
        """How it has ended, in words, "" where it did as it should; None: it runs."""
        if self._end is None and self._worker.has_ended(0.0):
            self.kill()
        return self._end

    def wait(self, timeout: float) -> str | None:
        """Wait until it has ended, for so many seconds at most: its `end`."""
        self._worker.has_ended(timeout)
        return self.end

    @property
    def log(self) -> str:
        """Lines that it has written last. From any thread."""
        return bytes(self._written).decode(errors="replace")

    def terminate(self) -> None:
        """Tell it to end, by SIGTERM."""
        if self.end is None:
            os.kill(self._worker.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End it now, with whatever it has started and left in its process group."""
        if self._end is not None:
            return
        how = self._worker.ended() if self._worker.has_ended(0.0) else "was killed by SIGKILL"
        self._worker.kill()
        self._reader.join(_LAST_BYTES_S)
        with contextlib.suppress(OSError):  # held open by what has left the process group
            self._source.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._source.close()
        self._end = "" if how == "exited with code 0" else how

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._source.recv(1 << 12):
                self._written += data
                del self._written[:-_MOST_BYTES]
