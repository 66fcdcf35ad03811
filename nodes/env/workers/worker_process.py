"""A worker process, seen from the one that started it.

Workers whose module is slow to import are forked off a server that has imported it, of `multiprocessing.forkserver`.
Those of one module share a server, which is none of the program's own, and ends with this process.
"""

import atexit
import contextlib
import faulthandler
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
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from multiprocessing import (
    Process,
    forkserver,
    get_all_start_methods,
    parent_process,
    popen_forkserver,
    resource_tracker,
)
from multiprocessing.util import Finalize
from pathlib import Path
from time import monotonic
from typing import Any

import cloudpickle

from rollflow.stream.data.closing import closing_on_error
from rollflow.stream.data.errors import EnvError, RunError
from rollflow.stream.data.system import at_fork, system_module
from rollflow.stream.net import backoff
from rollflow.stream.observe.stacks import (
    DUMP_SIGNAL,
    StackFrame,
    is_stopped,
    stack_in_dump,
    thread_dump,
    worker_dump_file,
)

fcntl = system_module("fcntl")
logger = logging.getLogger(__name__)

MOST_FDS = 64  # that come with what is received at a time
_UNKNOWN_CODE = 255  # of a process whose fork server has gone, as `multiprocessing` has it
_ANSWERED_WITHIN_S = 1.0  # by a fork server
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")  # that an import starts, and a fork lacks
# A process that has done its work ends when all that was to be called at its exit has been called, which is why this
# comes first in it: to take torch apart would take a second, and several where cores are busy.
_PROGRAM = """
import atexit, os, sys
done = []
atexit.register(lambda: done and (sys.stdout.flush(), sys.stderr.flush(), os._exit(0)))
import faulthandler
faulthandler.register({signal}, file={stacks}, all_threads=False)
sys.path[:], sys.argv[:] = {path!r}, {argv!r}
from {module} import main
main({life}, {fds})
done.append(True)
"""
_is_worker = False  # this process


def become_worker(name: str, life: int) -> None:
    """Say that this process is a worker: it starts none of its own, and ends when the pipe `life` is closed.

    name    that `top` and `ps` show for it, up to 15 characters
    """
    global _is_worker
    _is_worker = True
    with contextlib.suppress(OSError):  # there is no /proc
        Path("/proc/self/comm").write_text(name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started this process ends it
    end_with_parent(life)


def end_with_parent(fd: int) -> None:
    """End this process's group when the other end of a pipe is closed, whatever it is doing then.

    The kernel sends the signal, so that it comes through even if the interpreter never gets its turn, and to what
    environments have forked as well. On Linux it is SIGKILL, which ends a process that is stopped too.
    """
    fcntl.fcntl(fd, fcntl.F_SETOWN, -os.getpgrp())
    if hasattr(fcntl, "F_SETSIG"):
        ending: int = signal.SIGKILL
        fcntl.fcntl(fd, fcntl.F_SETSIG, ending)
    else:
        ending = signal.SIGIO
        signal.signal(ending, signal.SIG_DFL)  # to be killed by it
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(fd, 0)
    if poll.poll(0):  # it was closed before anybody was asked to tell
        os.killpg(0, ending)


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

    Raises RunError in a worker process, and OSError if it can't be started.
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
                self._process: _Forked | subprocess.Popen[bytes]
                self._process = forked or _spawned(module, descriptors, environment)
        finally:
            os.close(life)
            for other in theirs:
                other.close()
        self.is_ours = True
        with contextlib.suppress(AttributeError, OSError):  # other systems have none, and some sandboxes don't know it
            self._pidfd = os.pidfd_open(self.pid)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def fileno(self) -> int:
        """A descriptor that can be read once it has ended; -1 if there is none, or not any more."""
        return self._pidfd

    def has_ended(self, timeout: float) -> bool:
        """True if it has ended, within so many seconds."""
        if self._pidfd >= 0:
            # Its number stays taken until it is waited for: until then its process group can be told by it.
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            return bool(poll.poll(timeout * 1e3))
        try:
            return self._process.wait(timeout) is not None
        except subprocess.TimeoutExpired:
            return False

    def ended(self) -> str:
        """End of the process, in words; it is made to end, if it has not."""
        has_ended = self.has_ended(1.0)  # its sockets are closed a little before it has ended
        self.kill()
        if not has_ended:
            return "closed its socket"
        code = self._process.returncode
        if code is None or (code == _UNKNOWN_CODE and isinstance(self._process, _Forked)):
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
            if isinstance(self._process, _Forked):
                self._process.wait(_ANSWERED_WITHIN_S)
                self._process.close()
            else:
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
        """True while a signal such as SIGSTOP, or a debugger, has stopped it; False if that can't be seen."""
        return is_stopped(self.pid)

    def disown(self) -> None:
        """In a process that was forked off this one: the worker is the other's alone."""
        self.is_ours = False
        if isinstance(self._process, _Forked):
            self._process.close()
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


class _ForkedProgram(Process):
    """Program of a forked process, as `multiprocessing` runs it there.

    outputs    descriptors that the process is to write to, 1 and 2, as far as they are open here
    """

    def __init__(self, module: str, outputs: Sequence[int], environment: Mapping[str, str]) -> None:
        super().__init__(name=module)
        self._parts = module, outputs, environment

    def __reduce__(self) -> Any:
        return _ForkedProgram, self._parts

    def run(self) -> None:
        """Run `main` of the module as it would run in a process of its own."""
        module, outputs, environment = self._parts
        os.setpgid(0, 0)  # an interrupt at the terminal is for the parent to deal with
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        server: Any = forkserver._forkserver
        tracker: Any = resource_tracker._resource_tracker
        parent: Any = parent_process()
        for fd in (parent.sentinel, server._forkserver_alive_fd, tracker._fd):  # which others would wait for
            os.close(fd)
        tracker._fd = None  # this process starts its own, if it needs one
        gc.freeze()  # collections would copy the memory that is shared
        os.environ.clear()
        os.environ.update(environment)
        life, stacks, *sockets = self._inherited(outputs)
        faulthandler.register(DUMP_SIGNAL, file=stacks, all_threads=False)
        for name, random in (("numpy", "numpy.random"), ("torch", "torch")):
            if name in sys.modules:
                importlib.import_module(random).seed()  # else all processes would draw the same
        try:
            importlib.import_module(module).main(life, sockets)
        finally:
            threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
            atexit._run_exitfuncs()

    def _inherited(self, outputs: Sequence[int]) -> Sequence[int]:
        """The descriptors that came with the order, but for the outputs, which take their places."""
        inherited = forkserver.get_inherited_fds() or []
        for standard, fd in zip(outputs, inherited, strict=False):
            os.dup2(fd, standard)
            os.close(fd)
        return inherited[len(outputs) :]


class _Forked(popen_forkserver.Popen):
    """A process forked off a server. Raises OSError or EOFError if the server breaks, RunError if it has threads."""

    def __init__(self, server: Any, preload: str, program: _ForkedProgram, descriptors: Sequence[int]) -> None:
        self._server, self._descriptors = server, descriptors
        _start_server(server, preload)
        super().__init__(program)

    def _launch(self, program: Any) -> None:
        place = {"sys_path": sys.path, "sys_argv": sys.argv, "dir": os.getcwd()}
        self.sentinel, order = self._server.connect_to_new_process(self._descriptors)
        self.finalizer = Finalize(self, os.close, (self.sentinel,))
        with open(order, "wb") as file, closing_on_error(self.close):
            self.pid = forkserver.read_signed(self.sentinel)
            if len(os.listdir(f"/proc/{self._server._forkserver_pid}/task")) > 1:
                os.kill(self.pid, signal.SIGKILL)
                raise RunError("an import of it has begun threads")
            pickle.dump(place, file)
            pickle.dump(program, file)


def _spawned(module: str, descriptors: Sequence[int], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A process that imports for itself."""
    life, stacks, *fds = descriptors
    parts = {"path": sys.path, "argv": sys.argv, "module": module, "signal": int(DUMP_SIGNAL)}
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM.format(life=life, stacks=stacks, fds=fds, **parts)],
        stdin=subprocess.DEVNULL,
        pass_fds=descriptors,
        process_group=0,  # an interrupt at the terminal is for us to deal with
        env=environment,
    )


_servers: dict[str, forkserver.ForkServer | None] = {}  # by what they have imported; None: it can't be had


def _forked_off(
    preload: str, module: str, descriptors: Sequence[int], environment: Mapping[str, str]
) -> _Forked | None:
    """A process forked off a server that has imported `preload`, or None if this system has none, or it would differ.

    A server has one thread, and imports with one for each library: a fork has no other.
    """
    has_servers = "forkserver" in get_all_start_methods() and hasattr(os, "pidfd_open")
    if not has_servers or any(environment.get(each, "1") != "1" for each in _THREADS):
        return None
    server: Any = _servers.setdefault(preload, forkserver.ForkServer())
    if server is None:
        return None
    outputs = [fd for fd in (1, 2) if os.path.exists(f"/proc/self/fd/{fd}")]
    program = _ForkedProgram(module, outputs, environment)
    for _ in range(2):  # it may have been killed just then
        try:
            # Stopped, it can't fork a process later that prints that no order has come.
            with closing_on_error(partial(_stop_server, server)):
                return _Forked(server, preload, program, [*outputs, *descriptors])
        except (OSError, EOFError, RunError) as error:
            logger.info("worker processes may import %s each, as no fork server can: %s", preload, error)
            if isinstance(error, RunError):
                break  # which would begin them again
    _servers[preload] = None
    return None


def _start_server(server: Any, preload: str) -> None:
    """Start a server that does not run. It finds the modules that this process finds."""
    if server._forkserver_pid is not None and not os.waitid(
        os.P_PID, server._forkserver_pid, os.WEXITED | os.WNOHANG | os.WNOWAIT
    ):
        return
    server.set_forkserver_preload([preload])
    resource_tracker.ensure_running()  # which unblocks signals
    path = os.pathsep.join(folder for folder in sys.path if folder)
    variables = {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    before = {name: os.environ.get(name) for name in variables}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # it has none of an interrupt at the terminal
    os.environ.update(variables)  # a server takes those of this process
    try:
        server.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _stop_server(server: Any) -> None:
    """Kill a server that is of no use: one that ended by itself would take away the folder of other sockets here."""
    with contextlib.suppress(OSError):
        if server._forkserver_pid is not None:
            os.kill(server._forkserver_pid, signal.SIGKILL)
        server._stop()


def _end_server() -> None:
    """In a fork server: take away the file of its socket, which its parent could not if it was killed."""
    server: Any = forkserver._forkserver
    if server._forkserver_address and server._forkserver_pid is None and server._inherited_fds is None:
        with contextlib.suppress(OSError):
            os.unlink(server._forkserver_address)
            os.rmdir(os.path.dirname(server._forkserver_address))
        os._exit(0)  # without taking apart what it has imported


atexit.register(_end_server)


def pickled(value: Any, parts: Iterable[tuple[str, Any]], place: str = "a worker process") -> bytes:
    """A value, pickled for another process. Raises EnvError if it can't be, with the first of its parts that can't.

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


# A process that this one forks would hold the other ends of its workers' sockets and pipes, and so keep them alive when
# this one is killed. (The kernel could kill them with their parent, but means by that the thread that started them.)
_started: "weakref.WeakSet[WorkerProcess]" = weakref.WeakSet()
_starting = threading.Lock()


def _disown_all() -> None:
    for server in filter(None, _servers.values()):
        alive: Any = server
        if alive._forkserver_alive_fd is not None:  # by which it would go on while this process does
            os.close(alive._forkserver_alive_fd)
    _servers.clear()
    for worker in list(_started):
        worker.disown()
    _starting.release()


at_fork(before=_starting.acquire, after_in_parent=_starting.release, after_in_child=_disown_all)
