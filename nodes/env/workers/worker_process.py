"""A worker process, seen from the one that started it."""

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

from rollflow.nodes.closing import closing_on_error
from rollflow.nodes.env.workers.forked_process import ENDING, UNKNOWN_CODE, ForkedProcess, connected_server, fork_off
from rollflow.stream.data.errors import RunError
from rollflow.stream.data.system import at_fork
from rollflow.stream.doctor.stack_dumps import DUMP_SIGNAL, is_stopped, thread_dump, worker_dump_file
from rollflow.stream.doctor.stacks import Frame, stack_in_dump

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
MOST_FDS = 64  # that come with what is received at a time
_PROGRAM = """
life, stacks, *fds = descriptors
import faulthandler
faulthandler.register({signal}, file=stacks, all_threads=False)
sys.path[:], sys.argv[:] = {path!r}, {argv!r}
from {module} import main
main(life, fds)
done.append(True)
"""
_is_worker = False  # this process


def become_worker(name: str) -> None:
    """Say that this process is a worker: it starts none of its own.

    name    that `top` and `ps` show for it, up to 15 characters
    """
    global _is_worker
    _is_worker = True
    with contextlib.suppress(OSError):  # there is no /proc
        Path("/proc/self/comm").write_text(name)


def refuse_in_worker() -> None:
    """Raise RunError in a worker process."""
    if _is_worker:
        raise RunError(
            "a worker process of a rollout makes a rollout with workers of its own: most likely the module of its "
            "environment does so when it is imported; expected that to stand under if __name__ == '__main__'"
        ).see("pickle")


class WorkerProcess:
    """A Python process that runs `module.main(life, sockets)`, with one socket for each of its `sockets`.

    It is started with this process's `sys.path` and `sys.argv` and nothing else of it: neither its main module nor its
    threads. It ends when its sockets are closed or its work is done, and at the latest when this process ends. What it
    has started itself, and left in its process group, ends with it.

    is_forked    whether it is forked off a process that has imported what hosts import, where the system can: see
                 `fork_server`

    Raises RunError in a worker process, and OSError where it can't be started.
    """

    def __init__(self, module: str, sockets: int, *, is_forked: bool = False) -> None:
        refuse_in_worker()
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        server = connected_server(environment) if is_forked else None
        with _starting:
            self._start(module, sockets, environment, server)
            _started.add(self)

    def _start(self, module: str, sockets: int, environment: dict[str, str], server: socket.socket | None) -> None:
        pairs = [socket.socketpair() for _ in range(sockets)]
        self.sockets = [ours for ours, _ in pairs]
        theirs = [other for _, other in pairs]
        life, self._life = os.pipe()
        self._pidfd = -1
        self._stacks = worker_dump_file()  # closed with the sockets
        descriptors = [life, self._stacks.fileno(), *(other.fileno() for other in theirs)]
        program = _PROGRAM.format(path=sys.path, argv=sys.argv, module=module, signal=int(DUMP_SIGNAL))
        try:
            with closing_on_error(self._let_go):
                forked = None if server is None else fork_off(server, program, descriptors, environment)
                self._process: ForkedProcess | subprocess.Popen[bytes] = forked or subprocess.Popen(
                    [sys.executable, "-c", f"{ENDING}descriptors = {descriptors}{program}"],
                    stdin=subprocess.DEVNULL,
                    pass_fds=descriptors,
                    process_group=0,  # an interrupt at the terminal is for us to deal with
                    env=environment,
                )
        finally:
            os.close(life)
            for other in theirs:
                other.close()
        self.is_ours = True
        self._pidfd = _pidfd_of(self.pid)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def fileno(self) -> int:
        """A descriptor that can be read once it has ended; -1 where there is none, or not any more."""
        return self._pidfd

    def has_ended(self, timeout: float) -> bool:
        """True if it has ended, within so many seconds."""
        if self._pidfd >= 0:
            # Its number stays taken until it is waited for: until then its process group can be told by it.
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            return bool(poll.poll(timeout * 1e3))
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def ended(self) -> str:
        """End of the process, in words; it is made to end, if it has not."""
        has_ended = self.has_ended(1.0)  # its sockets are closed a little before it has ended
        self.kill()
        if not has_ended:
            return "closed its socket"
        code = self._process.wait()
        if code == UNKNOWN_CODE:
            return "has ended, and nobody knows how"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def kill(self) -> None:
        """End it now, and what is left in its process group."""
        if self.is_ours and self._process.returncode is None:
            if isinstance(self._process, ForkedProcess):
                self._process.kill_group()
            else:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGKILL)
                self._process.kill()
            self._process.wait()
        self._let_go()

    def stack_of(self, thread: int) -> tuple[Frame, ...]:
        """The stack of one of its threads, by the native id; empty: it did not answer. From any thread.

        To be called only once it runs: a signal that comes before would end it.
        """
        try:
            return stack_in_dump(thread_dump(self.pid, thread, self._stacks.fileno(), is_emptied=True))
        except (OSError, ValueError):  # it has ended, or is let go
            return ()

    @property
    def is_stopped(self) -> bool:
        """True while a signal such as SIGSTOP, or a debugger, has stopped it; False where that can't be seen."""
        return is_stopped(self.pid)

    def disown(self) -> None:
        """In a process that was forked off this one: the worker is the other's alone."""
        self.is_ours = False
        if isinstance(self._process, ForkedProcess):
            self._process.let_go()
        self._let_go()

    def _let_go(self) -> None:
        for sock in self.sockets:
            sock.close()
        self._stacks.close()
        if self._life >= 0:
            os.close(self._life)
            self._life = -1
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def core_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


Received = tuple[bytes, list[int]]  # bytes, and descriptors that came with them


def end_all(
    workers: Sequence[WorkerProcess], last_words: bytes, *, is_read: bool = False
) -> dict[socket.socket, Received]:
    """Have every process end: say so on its sockets, wait for a while, and kill those that have not heard.

    is_read    whether what processes had sent until their end is read: it is returned by their sockets
    """
    left: dict[socket.socket, Received] = {}
    ours = [worker for worker in workers if worker.is_ours]
    for worker in ours:
        for sock in worker.sockets:
            with contextlib.suppress(OSError):  # closed, or gone, or full: then the end of it all has to do
                sock.send(last_words)
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
    until = monotonic() + CLOSE_TIMEOUT_S
    for worker in ours:
        if not worker.has_ended(max(0.0, until - monotonic())):
            logger.warning(
                "worker process %d has not ended within %g s and is killed: its environments are not closed",
                worker.pid,
                CLOSE_TIMEOUT_S,
            )
        if is_read:
            left |= {sock: _left_in(sock) for sock in worker.sockets}
        worker.kill()
    return left


def _left_in(sock: socket.socket) -> Received:
    """What has come over a socket and was not read."""
    data, fds = bytearray(), list[int]()
    with contextlib.suppress(OSError):  # closed, or its other end is open still
        sock.setblocking(False)
        while True:
            more, with_it, _, _ = socket.recv_fds(sock, 1 << 18, MOST_FDS)
            if not more:
                break
            data += more
            fds += with_it
    return bytes(data), fds


def _pidfd_of(pid: int) -> int:
    if not hasattr(os, "pidfd_open"):
        return -1
    try:
        return os.pidfd_open(pid)
    except OSError:  # some sandboxes don't know it
        return -1


# A process that this one forks would hold the other ends of its workers' sockets and pipes, and so keep them alive when
# this one is killed. (The kernel could kill them with their parent, but means by that the thread that started them.)
_started: "weakref.WeakSet[WorkerProcess]" = weakref.WeakSet()
_starting = threading.Lock()


def _disown_all() -> None:
    for worker in list(_started):
        worker.disown()
    _starting.release()


at_fork(before=_starting.acquire, after_in_parent=_starting.release, after_in_child=_disown_all)
