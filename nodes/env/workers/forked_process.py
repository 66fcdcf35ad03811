"""Processes that are forked off a fork server, seen from the one that has asked for them."""

import contextlib
import hashlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import sleep

from rollflow.nodes.closing import closing_on_error
from rollflow.nodes.env.workers.fork_server import NUMBER, STARTED_WITHIN_S, check_other, namespaces

logger = logging.getLogger(__name__)

OFF_VARIABLE = "ROLLFLOW_FORK_SERVER"  # 0: nothing is forked off
UNKNOWN_CODE = 256  # of a program whose server has gone: no exit code is as large
_DIFFERING = ("RAY_", "CUDA_VISIBLE_DEVICES")  # variables that differ from actor to actor, and that no import looks at
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")  # that an import starts, and a fork lacks
_PROCESS_FILES = ("cgroup", "limits", "oom_score_adj")  # of /proc/self, that say what a process may do
_STATUS_LINES = ("Uid", "Gid", "Groups", "Umask", "SigBlk", "Cpus_allowed_list")
_ANSWERED_WITHIN_S = 1.0
_STARTS, _TRIES = 2, 100  # servers that are started, and looked for: they may end, or be begun by others, just then
# A process that has done its work ends when all that was to be called at its exit has been called, which is why this
# comes first in it: to take torch apart would take a second, and several where cores are busy.
ENDING = """
import atexit, os, sys
done = []
atexit.register(lambda: done and (sys.stdout.flush(), sys.stderr.flush(), os._exit(0)))
"""
_SERVER = """
if os.fork():
    os._exit(0)  # so that who has started the server does not have it as a child
sys.path[:] = {path!r}
from rollflow.nodes.env.workers.fork_server import ForkServer
program, descriptors = ForkServer({listener}).serve()
exec(program)
"""
_without: set[str] = set()  # names of servers that could not be had: each is tried once


class ForkedProcess:
    """A process that a fork server has forked off: what is used of `subprocess.Popen`.

    pid           its number
    returncode    None until it has been waited for; `UNKNOWN_CODE` where the server has gone, which alone knows it
    """

    def __init__(self, pid: int, server: socket.socket) -> None:
        self.pid, self._server = pid, server
        self.returncode: int | None = None
        with closing_on_error(server.close):
            self._end = os.pidfd_open(pid)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended: its code. Raises `subprocess.TimeoutExpired` after so many seconds."""
        if self.returncode is None:
            if not self._has_ended(timeout):
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            self._server.settimeout(_ANSWERED_WITHIN_S)
            code = b""
            with contextlib.suppress(OSError):  # the server is stopped
                code = self._server.recv(NUMBER.size)  # sent in one piece, and so read
            self.returncode = NUMBER.unpack(code)[0] if code else UNKNOWN_CODE
            with contextlib.suppress(OSError):  # it has gone
                self._server.shutdown(socket.SHUT_RDWR)  # also where a process that was forked has a copy
            self.let_go()
        return self.returncode

    def kill_group(self) -> None:
        """End it now, and its process group, unless its end has been waited for."""
        if self.returncode is not None or (self._has_ended(0.0) and not self._is_kept()):
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def let_go(self) -> None:
        """Close its descriptors: nothing more is to be known of it."""
        if self._end >= 0:
            os.close(self._end)
            self._end = -1
        self._server.close()

    def _has_ended(self, timeout: float | None) -> bool:
        if self._end < 0:  # it was let go
            return True
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        return bool(poll.poll(None if timeout is None else timeout * 1e3))

    def _is_kept(self) -> bool:
        """Whether its number is its own still: the server keeps it so."""
        self._server.setblocking(False)
        try:
            return bool(self._server.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False


def connected_server(environment: dict[str, str]) -> socket.socket | None:
    """Connection with a server that has imported all, for programs with these variables; None: none can be had."""
    name = ""
    if environment.get(OFF_VARIABLE) == "0" or any(environment.get(each, "1") != "1" for each in _THREADS):
        return None
    try:
        name = _name_for(environment)
        return None if name in _without else _connected(name, environment)
    except (AttributeError, OSError) as error:  # another system, or a sandbox that does not know what this takes
        logger.info("hosts import for themselves, since no fork server can be had: %s", error)
        _without.add(name)
    return None


def fork_off(
    server: socket.socket, program: str, descriptors: Sequence[int], environment: dict[str, str]
) -> ForkedProcess | None:
    """Have a process forked off, in a process group of its own, that runs the text of a program; None: start another.

    server         as `connected_server` gives it; it is the process's from now on
    descriptors    that the process gets, with other numbers: a list in its variable of this name

    Raises OSError where the server has gone after it got the order: the process may be there, so start no other.
    """
    data = json.dumps({"program": program, "environment": environment}).encode()
    with closing_on_error(server.close):
        try:
            socket.send_fds(server, [NUMBER.pack(len(data))], list(descriptors))
            server.sendall(data)
        except OSError:  # it has not got all of it
            server.close()
            return None
        answer = server.recv(NUMBER.size)
        if not answer:
            raise ConnectionError("the fork server has gone")
        [pid] = NUMBER.unpack(answer)
        if pid < 0:
            server.close()
            return None
    return ForkedProcess(pid, server)


def _name_for(environment: dict[str, str]) -> str:
    """Name of the server for programs that import the same, and may do the same. Raises OSError."""
    os.close(os.pidfd_open(os.getpid()))  # is known
    lines = Path("/proc/self/status").read_text().splitlines()
    key = [
        [sys.executable, *map(str, sys.path), os.getcwd(), os.getpriority(os.PRIO_PROCESS, 0)],
        sorted(each for each in environment.items() if not each[0].startswith(_DIFFERING)),
        [line for line in lines if line.startswith(_STATUS_LINES)],
        [Path("/proc/self", file).read_text() for file in _PROCESS_FILES],
        namespaces("self"),
    ]
    return (
        f"\0rollflow-forks-{hashlib.sha256(json.dumps(key).encode()).hexdigest()}"  # no file: it goes with the server
    )


def _connected(name: str, environment: dict[str, str]) -> socket.socket:
    """Connection with the server of this name, which is started if it is not there. Raises OSError."""
    starts = 0
    for _ in range(_TRIES):
        server = socket.socket(socket.AF_UNIX)
        with closing_on_error(server.close):
            server.settimeout(STARTED_WITHIN_S)
            try:
                server.connect(name)
                check_other(server)
                if server.recv(1):  # else it has ended just now
                    return server
            except (ConnectionRefusedError, ConnectionResetError):
                if starts == _STARTS:
                    break
                starts += _start(name, environment)
        server.close()
    server.close()
    raise ConnectionError("it ends as soon as it is asked")


def _start(name: str, environment: dict[str, str]) -> bool:
    """Start a server; False: somebody else is about to, or one is about to end, which nothing tells."""
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(name)
        except OSError:
            sleep(0.01)
            return False
        listener.listen(socket.SOMAXCONN)  # who connects from now on is served once all is imported
        program = ENDING + _SERVER.format(path=list(map(str, sys.path)), listener=listener.fileno())
        subprocess.run(
            [sys.executable, "-c", program],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # it may outlive this process, whose readers wait for the end of its output
            stderr=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            start_new_session=True,  # an interrupt at the terminal is not for it
            env=environment,
        )
    return True
