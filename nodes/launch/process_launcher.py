"""Programs as processes of this machine, and their launcher: each makes one call that is pickled here."""

import contextlib
import os
import pickle
import signal
import socket
import threading
from collections.abc import Sequence
from time import monotonic
from typing import Any

from rollflow.nodes.env.workers.worker_process import WorkerProcess
from rollflow.stream.data.blocks import written_block

_MOST_BYTES = 1 << 14  # of what it has written
_LAST_BYTES_S = 1.0  # until what a process wrote before its end has been read
_ENDING_S = 1.0  # for programs that are ending by themselves
_LEAVING_S = 5.0  # for those that are told to end once nobody needs them


class ProgramProcess:
    """Runs a program in a process that ends when this one does, whatever ends it.

        call       pickled function of a name, which gives the exit status
        name       that it is called with
        preload    module that takes long to import: see `WorkerProcess`

    Neither stands on the process's command line. Raises RunError in a worker process.
    """

    def __init__(self, call: bytes, name: str, preload: str | None = None) -> None:
        self.name = name
        self._worker = WorkerProcess("rollflow.nodes.launch.program", 2, preload=preload)
        orders, written = self._worker.sockets
        self._end: str | None = None
        self._written = bytearray()
        self._source = written.dup()  # read by another thread: the worker's is closed under its hands
        self._reader = threading.Thread(target=self._read, name="rollflow program", daemon=True)
        self._reader.start()
        block = written_block(call)  # of any size: it waits for nobody to read it
        with contextlib.suppress(OSError):  # it has ended already, which `end` says
            socket.send_fds(orders, [pickle.dumps((block.size, name))], [block.fd])
        block.close()

    @property
    def end(self) -> str | None:
        """How it has ended, in words, "" if it did as it should; None: it runs."""
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


class ProcessLauncher:
    """Runs programs that make one call, as processes of this machine.

    preload    module that takes long to import: see `WorkerProcess`

    None of its programs outlives the process that has it, not even if that process is killed.
    """

    def __init__(self, preload: str | None = None) -> None:
        self._preload = preload

    def run(self, number: int, call: bytes) -> ProgramProcess:
        """Run the program of a number: it makes a pickled call with its name."""
        return ProgramProcess(call, f"process-{number}", self._preload)

    def waits(self, running: Sequence[int]) -> str:
        """What some of these programs wait for before they can begin, in words; "": none does."""
        return ""

    def stop(self, programs: Sequence[ProgramProcess]) -> None:
        """End all programs: those that are ending by themselves first, the others by SIGTERM, and then by SIGKILL."""
        await_ends(programs, _ENDING_S)
        for program in programs:
            program.terminate()
        await_ends(programs, _LEAVING_S)
        for program in programs:
            program.kill()


def await_ends(programs: Sequence[Any], timeout: float) -> None:
    """Wait until all programs have ended, for so many seconds at most."""
    until = monotonic() + timeout
    for program in programs:
        program.wait(max(0.0, until - monotonic()))
