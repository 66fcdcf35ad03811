"""Programs as processes of this machine, and their launcher: each makes one call that is pickled here."""

import contextlib
import os
import pickle
import signal
import socket
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from time import monotonic

from rollflow.nodes.env.workers.worker_process import WorkerProcess
from rollflow.stream.data.blocks import written_block
from rollflow.stream.data.closing import closing_on_error

_MOST_BYTES = 1 << 14  # of what it has written
_LAST_BYTES_S = 1.0  # until what a process wrote before its end has been read
_ENDING_S = 1.0  # for programs that are ending by themselves
_LEAVING_S = 5.0  # for those that are told to end once nobody needs them


@dataclass(slots=True, eq=False)
class Handle:
    """A program that a launcher has started; the launcher's `alive` brings the first fields up to date.

    name     stays the same when the program is started again
    waits    what it waits for before it can begin, in words; "" where it waits for nothing
    end      how it has ended, in words; "" while it runs, and where it ended as it should

    What a `HostKeeper` notes:

    since       when it was started last, on the clock `monotonic`
    failures    in a row
    due         when it is to be started again; None: it runs
    reason      how it failed last, in one line; "": it never did
    """

    name: str
    waits: str = ""
    end: str = ""
    since: float = field(default_factory=monotonic)
    failures: int = 0
    due: float | None = None
    reason: str = ""


class ProgramProcess:
    """Runs a program in a process that ends when this one does, whatever ends it.

        call       pickled function of a name, which gives the exit status
        name       that it is called with
        preload    module that takes long to import: see `WorkerProcess`

    Neither stands on the process's command line. Raises RunError in a worker process.
    """

    def __init__(self, call: bytes, name: str, preload: str | None = None) -> None:
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


class ProcessLauncher:
    """Starts programs that make one call, as processes of this machine.

    preload    module that takes long to import: see `WorkerProcess`

    It starts once, and is used by one thread at a time. None of its programs outlives the process that has it, not even
    where that process is killed.
    """

    def __init__(self, preload: str | None = None) -> None:
        self._programs: dict[Handle, ProgramProcess] = {}
        self._call, self._preload = b"", preload

    def start(self, n: int, call: bytes) -> list[Handle]:
        """Start so many programs: each makes a pickled call with the name of its handle."""
        self._call = call
        with closing_on_error(self.stop):
            for number in range(n):
                handle = Handle(f"process-{number}")
                self._programs[handle] = self._run(handle)
        return list(self._programs)

    def alive(self) -> list[Handle]:
        """The programs that run."""
        for handle, program in self._programs.items():
            handle.end = program.end or ""
        return [handle for handle, program in self._programs.items() if program.end is None]

    def logs(self, handle: Handle) -> str:
        """Lines that a program has written last."""
        return self._programs[handle].log

    def restart(self, handle: Handle) -> None:
        """Start a program again; one that runs is killed first."""
        self._programs[handle].kill()
        self._programs[handle], handle.end = self._run(handle), ""

    def stop(self) -> None:
        """End all programs: those that are ending by themselves first, the others by SIGTERM, and then by SIGKILL."""
        programs = list(self._programs.values())
        _await(programs, _ENDING_S)
        for program in programs:
            program.terminate()
        _await(programs, _LEAVING_S)
        for program in programs:
            program.kill()
        self._programs.clear()

    def _run(self, handle: Handle) -> ProgramProcess:
        return ProgramProcess(self._call, handle.name, self._preload)


def _await(programs: Iterable[ProgramProcess], timeout: float) -> None:
    until = monotonic() + timeout
    for program in programs:
        program.wait(max(0.0, until - monotonic()))
