"""A worker process, seen from the one that started it.

Workers whose module is slow to import are forked off a server: a process like any of them that has imported it, and
forks before it runs. Those of one module share a server, which ends with this process.
"""

import atexit
import contextlib
import gc
import importlib
import logging
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import cloudpickle

from rollflow.stream.data.closing import closing_on_error
from rollflow.stream.data.errors import EnvError, RunError
from rollflow.stream.data.system import at_fork
from rollflow.stream.net import backoff
from rollflow.stream.observe.stacks import (
    DUMP_SIGNAL,
    StackFrame,
    is_stopped,
    stack_in_dump,
    thread_dump,
    worker_dump_file,
)

logger = logging.getLogger(__name__)

MOST_FDS = 64  # that come with what is received at a time
UNKNOWN_CODE = 256  # of a process whose fork server has gone: no exit code is as large
_ANSWERED_WITHIN_S = 1.0  # by a fork server
_TRIES = 2  # in a row, of having one: it may be killed at any time
_MOST_BYTES, _MOST_ORDER_FDS = 1 << 20, 253  # of an order to a fork server: as many as a system takes
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")  # that an import starts, and a fork lacks
# A process that has done its work ends when all that was to be called at its exit has been called, which is why this
# comes first in it: to take torch apart would take a second, and several where cores are busy.
_PROGRAM = """
import atexit, faulthandler, os, sys
from importlib import import_module
done = []
atexit.register(lambda: done and (sys.stdout.flush(), sys.stderr.flush(), os._exit(0)))
sys.path[:], sys.argv[:] = {path!r}, {argv!r}
module, life, stacks, *fds = {order}
faulthandler.register({signal}, file=stacks, all_threads=False)
import_module(module).main(life, fds)
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

    preload    module that takes long to import: the process is forked off a server that has imported it, if the system
               has fork servers. None: the process imports for itself

    Raises RunError in a worker process, and OSError where it can't be started.
    """

    def __init__(self, module: str, sockets: int, *, preload: str | None = None) -> None:
        refuse_in_worker()
        with _starting:
            self._start(module, sockets, preload)
            _started.add(self)

    def _start(self, module: str, sockets: int, preload: str | None) -> None:
        pairs = [socket.socketpair() for _ in range(sockets)]
        self.sockets = [ours for ours, _ in pairs]
        theirs = [other for _, other in pairs]
        life, self._life = os.pipe()
        self._pidfd = -1
        self._stacks = worker_dump_file()  # closed with the sockets
        descriptors = [life, self._stacks.fileno(), *(other.fileno() for other in theirs)]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        try:
            with closing_on_error(self._let_go):
                forked = None if preload is None else _forked_off(preload, module, descriptors, environment)
                self._process: _ForkedProcess | subprocess.Popen[bytes]
                self._process = forked or _interpreter(repr((module, *descriptors)), descriptors, environment)
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
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if self._has_number():
                    os.killpg(self.pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                if self._pidfd >= 0:
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
                elif isinstance(self._process, subprocess.Popen):
                    self._process.kill()
            self._process.wait()
        self._let_go()

    def stack_of(self, thread: int) -> tuple[StackFrame, ...]:
        """The stack of one of its threads, by the native id; empty: it is stopped, or did not answer. From any thread.

        thread    0: it has none yet; a signal that comes before it runs would end it
        """
        if not thread or self.is_stopped:
            return ()
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
        if isinstance(self._process, _ForkedProcess):
            self._process.status.close()
        self._let_go()

    def _has_number(self) -> bool:
        """False if its number may be another process's: it has ended, and a fork server has waited for it."""
        if isinstance(self._process, subprocess.Popen):
            return True
        is_free = self._pidfd < 0 or "\nPid:\t-1\n" in Path(f"/proc/self/fdinfo/{self._pidfd}").read_text()
        return not (is_free and Path(f"/proc/{self.pid}").exists())

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


class _ForkedProcess:
    """A process that a fork server has forked off: what is used of `subprocess.Popen`.

    status        gives its exit code, once it has ended, or ends with the server
    pid           its number
    returncode    None until it has been waited for; `UNKNOWN_CODE` if the server has gone, which alone knows it
    """

    pid: int
    returncode: int | None = None

    def __init__(self, status: int) -> None:
        self.status = open(status, "rb", buffering=0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended: its code. Raises `subprocess.TimeoutExpired` after so many seconds.

        timeout    None: it has ended, and the server is about to say so
        """
        if self.returncode is None:
            poll = select.poll()
            poll.register(self.status, select.POLLIN)
            is_answered = poll.poll(1e3 * (_ANSWERED_WITHIN_S if timeout is None else timeout))
            if not is_answered and timeout is not None:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            self.returncode = int((is_answered and self.status.read(16)) or UNKNOWN_CODE)
            self.status.close()
        return self.returncode


class _ForkServer:
    """A process that has imported `preload`, and forks off those of `fork`, one order at a time.

    Its only link to others is a pair of sockets without a name: it ends when this end of it is closed.
    """

    def __init__(self, preload: str, environment: Mapping[str, str]) -> None:
        os.close(os.pidfd_open(os.getpid()))  # which it sees ends by; some sandboxes don't know it
        self.sock, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other, closing_on_error(self.sock.close):
            order = f"import_module({__name__!r}).await_order({preload!r}, {other.fileno()})"
            self._process = _interpreter(order, [other.fileno()], environment)

    def fork(self, module: str, descriptors: Sequence[int], environment: Mapping[str, str]) -> _ForkedProcess:
        """A process that runs `main` of a module. Raises OSError where there can be none."""
        outputs = [fd for fd in (1, 2) if os.path.exists(f"/proc/self/fd/{fd}")]
        order = pickle.dumps((module, os.getcwd(), sys.path, sys.argv, dict(environment), outputs))
        status, written = os.pipe()
        process = _ForkedProcess(status)
        with closing_on_error(process.status.close):
            try:
                socket.send_fds(self.sock, [order], [written, *outputs, *descriptors])
            finally:
                os.close(written)
            answer = self.sock.recv(_MOST_BYTES)
            if not answer.isdigit():
                raise OSError(answer.decode() or "it has ended")
        process.pid = int(answer)
        return process

    def stop(self) -> None:
        """End it; the processes that it has forked off go on."""
        self.sock.close()
        self._process.kill()
        self._process.wait()


def await_order(preload: str, fd: int) -> tuple[Any, ...]:
    """In a fork server: import a module, and fork off a process for every order that comes over a socket.

    Returns in each of these processes: module, life, stacks and sockets, as `_PROGRAM` has them. The server itself ends
    here, once the other end of the socket is closed.
    """
    importlib.import_module(preload)
    gc.freeze()  # collections would copy the memory that is shared
    orders = socket.socket(fileno=fd)
    if len(os.listdir("/proc/self/task")) > 1:
        orders.send(b"an import of it has begun threads")
        os._exit(0)
    running: dict[int, tuple[int, int]] = {}  # by what tells of its end: a process, and where its exit code goes
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready != fd:
                poll.unregister(ready)
                pid, status = running.pop(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with contextlib.suppress(BrokenPipeError):  # it is not waited for any more
                    os.write(status, b"%d" % code)
                os.close(status)
                os.close(ready)
                continue
            order, fds, _, _ = socket.recv_fds(orders, _MOST_BYTES, _MOST_ORDER_FDS)
            if not order:
                os._exit(0)  # without taking apart what it has imported
            pid = os.fork()
            if not pid:
                orders.close()
                for each in (*running, *(status for _, status in running.values()), fds[0]):
                    os.close(each)
                return _begun(order, fds[1:])
            running[ended := os.pidfd_open(pid)] = pid, fds[0]
            poll.register(ended, select.POLLIN)
            for each in fds[1:]:
                os.close(each)
            orders.send(b"%d" % pid)


def _begun(order: bytes, descriptors: Sequence[int]) -> tuple[Any, ...]:
    """In a forked process: be as the one that has given the order; its module and its other descriptors."""
    os.setpgid(0, 0)  # an interrupt at the terminal is for the parent to deal with
    module, folder, sys.path[:], sys.argv[:], environment, outputs = pickle.loads(order)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for standard, fd in zip(outputs, descriptors, strict=False):
        os.dup2(fd, standard)
        os.close(fd)
    for name, random in (("numpy", "numpy.random"), ("torch", "torch")):
        if name in sys.modules:
            importlib.import_module(random).seed()  # else all processes would draw the same
    return module, *descriptors[len(outputs) :]


def _interpreter(order: str, descriptors: Sequence[int], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A Python process that runs `_PROGRAM`, and has these descriptors.

    order    expression that gives module, life, stacks and sockets
    """
    program = _PROGRAM.format(path=sys.path, argv=sys.argv, order=order, signal=int(DUMP_SIGNAL))
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.DEVNULL,
        pass_fds=descriptors,
        process_group=0,  # an interrupt at the terminal is for us to deal with
        env=environment,
    )


_servers: dict[str, _ForkServer] = {}  # by what they have imported
_failures: Counter[str] = Counter()  # of servers in a row, by what they were to import


def _forked_off(
    preload: str, module: str, descriptors: Sequence[int], environment: Mapping[str, str]
) -> _ForkedProcess | None:
    """A process forked off a server that has imported `preload`, or None if this system has none, or it would differ.

    A server has one thread, and imports with one for each library: a fork has no other.
    """
    if not hasattr(os, "pidfd_open") or any(environment.get(each, "1") != "1" for each in _THREADS):
        return None
    while _failures[preload] < _TRIES:
        try:
            server = _servers.pop(preload, None) or _ForkServer(preload, environment)
            with closing_on_error(server.stop):  # after a Ctrl-C its answer would be taken for that to the next order
                process = server.fork(module, descriptors, environment)
            _servers[preload], _failures[preload] = server, 0
            return process
        except OSError as error:
            _failures[preload] += 1
            logger.info("worker processes may import %s each, as no fork server can: %s", preload, error)
    return None


@atexit.register
def _stop_servers() -> None:
    while _servers:
        _servers.popitem()[1].stop()


def pickled(value: Any, parts: Iterable[tuple[str, Any]], place: str = "a worker process") -> bytes:
    """A value, pickled for another process. Raises EnvError where it can't be, with the first of its parts that can't.

    parts    names and values
    place    that it goes to
    """
    try:
        made: bytes = cloudpickle.dumps(value)
    except Exception as error:
        whose = next((name for name, part in parts if not _can_be_pickled(part)), "the rollout")
        raise EnvError(
            f"{whose} can't be handed to {place}: {error}; expected an id, or what holds nothing that can't be pickled"
        ).see("pickle") from error
    return made


def _can_be_pickled(part: Any) -> bool:
    try:
        cloudpickle.dumps(part)
    except Exception:
        return False
    return True


def core_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def end_all(workers: Sequence[WorkerProcess]) -> None:
    """Have every process end: end what goes to its sockets, wait for a while, and kill those that have not heard."""
    ours = [worker for worker in workers if worker.is_ours]
    for worker in ours:
        for sock in worker.sockets:
            with contextlib.suppress(OSError):  # closed, or gone
                sock.shutdown(socket.SHUT_WR)
    limit = backoff.times.close_s
    until = monotonic() + limit
    for worker in ours:
        if not worker.has_ended(max(0.0, until - monotonic())):
            logger.warning(
                "worker process %d has not ended within %g s and is killed: its environments are not closed",
                worker.pid,
                limit,
            )
        worker.kill()


def _pidfd_of(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # other systems have none, and some sandboxes don't know it
        return -1


# A process that this one forks would hold the other ends of its workers' sockets and pipes, and so keep them alive when
# this one is killed. (The kernel could kill them with their parent, but means by that the thread that started them.)
_started: "weakref.WeakSet[WorkerProcess]" = weakref.WeakSet()
_starting = threading.Lock()


def _disown_all() -> None:
    for server in _servers.values():
        server.sock.close()  # by which it would go on while this process does
    _servers.clear()
    for worker in list(_started):
        worker.disown()
    _starting.release()


at_fork(before=_starting.acquire, after_in_parent=_starting.release, after_in_child=_disown_all)
