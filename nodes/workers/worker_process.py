"""A worker process, seen from the one that started it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

CLOSE_TIMEOUT_S = 5.0


class WorkerProcess:
    """A Python process that runs `module.main(life, sockets)`, with one socket for each of its `sockets`.

    It is started with this process's `sys.path` and nothing else of it: neither its main module nor its threads. It
    ends when its sockets are closed or its work is done, and at the latest when this process ends.
    """

    def __init__(self, module: str, sockets: int) -> None:
        pairs = [socket.socketpair() for _ in range(sockets)]
        self.sockets = [ours for ours, _ in pairs]
        theirs = [other for _, other in pairs]
        life, self._life = os.pipe()
        fds = [other.fileno() for other in theirs]
        program = f"import sys; sys.path[:] = {sys.path!r}; from {module} import main; main({life}, {fds})"
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                pass_fds=[life, *fds],
                process_group=0,  # an interrupt at the terminal is for us to deal with
                env={"OMP_NUM_THREADS": "1", **os.environ},
            )
        finally:
            os.close(life)
            for other in theirs:
                other.close()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def ended(self) -> str:
        """How it ended; it is made to, if it has not."""
        try:
            code = self._process.wait(1.0)  # its sockets are closed a little before it has ended
        except subprocess.TimeoutExpired:
            self.kill()
            return "closed its socket"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def kill(self) -> None:
        """End it now."""
        self._process.kill()
        self._process.wait()
        self._let_go()

    def _let_go(self) -> None:
        for sock in self.sockets:
            sock.close()
        if self._life >= 0:
            os.close(self._life)
            self._life = -1


def core_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def end_all(workers: Sequence[WorkerProcess], last_words: bytes) -> None:
    """Have every process end: say so on its sockets, wait for a while, and kill those that have not heard."""
    for worker in workers:
        for sock in worker.sockets:
            with contextlib.suppress(OSError):  # closed, or gone, or full: then the end of it all has to do
                sock.send(last_words)
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
    left = CLOSE_TIMEOUT_S
    for worker in workers:
        try:
            worker._process.wait(left)
        except subprocess.TimeoutExpired:
            left = 0.0
        worker.kill()
