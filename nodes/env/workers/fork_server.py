"""Fork server: a process that has imported what hosts import, and from which each program is forked off in a moment.

Processes of one user that find the same packages in the same way share one, such as the actors that Ray has on a node:
an import of torch takes more than a second of a core, and memory, each time. It is started by whoever needs it first,
and ends with its last program. The programs do not depend on it: where it is killed, they go on.
"""

import contextlib
import gc
import hashlib
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from dataclasses import dataclass
from time import sleep
from typing import Any

import numpy as np

from rollflow.nodes.closing import closing_on_error

_PRELOADED = ("rollflow.nodes.offloaded.rollout_host",)  # by name: it imports nearly all there is
_UNSHARED = (
    "RAY_",
    "CUDA_VISIBLE_DEVICES",
)  # variables that imports don't look at, and that differ from actor to actor
_MOST_DESCRIPTORS = 16
_NUMBER, _CREDENTIALS = struct.Struct("<i"), struct.Struct("3i")
_STARTED_WITHIN_S, _SENT_WITHIN_S = 60.0, 10.0
_TRIES = 5  # with servers that have ended just then
_SERVER = """
import os, sys
if os.fork():
    os._exit(0)  # so that nobody has the server as a child
sys.path[:] = {path!r}
from rollflow.nodes.env.workers.fork_server import ForkServer
program, descriptors = ForkServer({listener}).serve()
exec(program)
"""


class ForkedProcess:
    """A process that a fork server has forked off: what is used of `subprocess.Popen`.

    Its number stays taken until its end has been waited for.

    pid           its number
    returncode    None until it has been waited for; -SIGKILL as well where the server is gone, which alone knows it
    """

    def __init__(self, pid: int, server: socket.socket) -> None:
        self.pid, self._server = pid, server
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended: its code. Raises `subprocess.TimeoutExpired` after so many seconds."""
        if self.returncode is None:
            self._server.settimeout(timeout)
            try:
                told = _received(self._server, _NUMBER.size)
            except TimeoutError as error:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0) from error
            except OSError:
                told = b""
            self.returncode = _NUMBER.unpack(told)[0] if told else -signal.SIGKILL
            self._server.close()
        return self.returncode

    def kill(self) -> None:
        """End it now, unless its end has been waited for."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def fork_off(program: str, descriptors: list[int], environment: dict[str, str]) -> ForkedProcess | None:
    """Have a process forked off, in a process group of its own, that runs the text of a program.

    descriptors    that it gets, with other numbers: a list in its variable of this name

    None where no server can be had. Raises OSError where one is lost that may have forked it off.
    """
    server = _connected(environment)
    if server is None:
        return None
    order = {
        "program": program,
        "environment": environment,
        "folder": os.getcwd(),
        "cores": sorted(os.sched_getaffinity(0)),
    }
    data = json.dumps(order).encode()
    with closing_on_error(server.close):
        socket.send_fds(server, [_NUMBER.pack(len(data))], descriptors)
        server.sendall(data)
        told = _received(server, _NUMBER.size)
        if not told:
            raise ConnectionError("the fork server has ended")
    return ForkedProcess(_NUMBER.unpack(told)[0], server)


def _connected(environment: dict[str, str]) -> socket.socket | None:
    """Connection with the server for this environment, which is started if it is not there; None: none can be had."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):  # another system, or a sandbox that does not know it
        return None
    shared = {name: value for name, value in environment.items() if not name.startswith(_UNSHARED)}
    spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("mnt", "pid")]
    found_by = json.dumps([sys.executable, sys.path, sorted(shared.items()), os.getuid(), spaces])
    name = f"\0rollflow-forks-{hashlib.sha256(found_by.encode()).hexdigest()}"  # no file: it is gone with the server
    for _ in range(_TRIES):
        server = socket.socket(socket.AF_UNIX)
        try:
            server.settimeout(_STARTED_WITHIN_S)
            server.connect(name)
            _check_user(server)
            if server.recv(1):  # else it has ended just now
                return server
        except (ConnectionRefusedError, ConnectionResetError):
            _start(name, environment)
        except OSError:
            server.close()
            return None
        server.close()
    return None


def _start(name: str, environment: dict[str, str]) -> None:
    """Start a server, unless somebody else is about to."""
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(name)
        except OSError:
            sleep(0.01)
            return
        listener.listen(socket.SOMAXCONN)  # who connects from now on is served once all is imported
        program = _SERVER.format(path=sys.path, listener=listener.fileno())
        subprocess.run(
            [sys.executable, "-c", program],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # it may outlive this process, whose readers wait for the end of its output
            stderr=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            start_new_session=True,  # an interrupt at the terminal is not for it
            env=environment,
        )


def _check_user(other: socket.socket) -> None:
    """Raise PermissionError where the other end is another user's."""
    _, user, _ = _CREDENTIALS.unpack(other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user != os.getuid():
        raise PermissionError(f"the fork server is one of user {user}, expected one of user {os.getuid()}")


def _received(sock: socket.socket, size: int) -> bytes:
    """So many bytes; none where the other end is gone before."""
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            return b""
        data += more
    return data


# In the server


@dataclass(slots=True, eq=False)
class _Program:
    """Program that was forked off.

    end          descriptor that can be read once it has ended
    client       who has asked for it; None: it is gone
    has_ended    whether its end is known: its number is taken until the client is gone
    """

    pid: int
    end: int
    client: socket.socket | None
    has_ended: bool = False


class ForkServer:
    """Server of a listening socket, whose descriptor it is given."""

    def __init__(self, listener: int) -> None:
        self._listener = socket.socket(fileno=listener)
        self._programs: list[_Program] = []

    def serve(self) -> tuple[str, list[int]]:
        """Import, and fork off what is asked for, until the last program has ended: the process ends then.

        Returns in each process that is forked off: its program, and its descriptors.
        """
        for name in _PRELOADED:
            importlib.import_module(name)
        gc.collect()
        gc.freeze()  # collections would copy the memory that is shared
        patience_ms = _STARTED_WITHIN_S * 1e3
        while ready := self._ready(patience_ms):
            for program in list(self._programs):
                self._look_after(program, ready)
            if self._listener.fileno() in ready:
                order = self._answered()
                if order is not None:
                    return order
                patience_ms = 0
        os._exit(0)  # to take torch apart would take a second

    def _ready(self, patience_ms: float) -> set[int]:
        """Descriptors where there is something to do; without a program, none after this time."""
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        for program in self._programs:
            if not program.has_ended:
                poll.register(program.end, select.POLLIN)
            if program.client is not None:
                poll.register(program.client, select.POLLIN)
        return {descriptor for descriptor, _ in poll.poll(None if self._programs else patience_ms)}

    def _answered(self) -> tuple[str, list[int]] | None:
        """Fork off what a client asks for. In the process that is forked off: its program and descriptors."""
        client, _ = self._listener.accept()
        descriptors: list[int] = []
        try:
            _check_user(client)
            client.settimeout(_SENT_WITHIN_S)
            client.sendall(b"\n")
            size, descriptors, _, _ = socket.recv_fds(client, _NUMBER.size, _MOST_DESCRIPTORS)
            order = json.loads(_received(client, _NUMBER.unpack(size)[0]))
        except (OSError, ValueError, struct.error):  # it is gone, or nobody of ours
            _close(client, descriptors)
            return None
        pid = os.fork()
        if not pid:
            self._become(order)
            client.close()
            return order["program"], descriptors
        with contextlib.suppress(OSError):  # it has done so itself
            os.setpgid(pid, pid)
        program = _Program(pid, os.pidfd_open(pid), client)
        self._programs.append(program)
        _close(None, descriptors)
        self._tell(client, pid)
        return None

    def _become(self, order: dict[str, Any]) -> None:
        """Be what is forked off: without what is the server's, as if it had been started by whoever asks."""
        with contextlib.suppress(OSError):  # the server has done so
            os.setpgid(0, 0)
        self._listener.close()
        for program in self._programs:
            _close(program.client, [program.end])
        os.environ.clear()
        os.environ.update(order["environment"])
        os.chdir(order["folder"])
        os.sched_setaffinity(0, order["cores"])
        np.random.seed()  # else all programs would draw the same

    def _look_after(self, program: _Program, ready: set[int]) -> None:
        """Tell the client how its program has ended; forget the program once it has, and the client is gone."""
        client = program.client
        if program.end in ready and not program.has_ended:
            how = os.waitid(os.P_PID, program.pid, os.WEXITED | os.WNOWAIT)
            assert how is not None
            program.has_ended = True
            self._tell(client, how.si_status if how.si_code == os.CLD_EXITED else -how.si_status)
        if client is not None and client.fileno() in ready:
            client.close()
            program.client = None
        if program.has_ended and program.client is None:
            os.waitpid(program.pid, 0)
            os.close(program.end)
            self._programs.remove(program)

    def _tell(self, client: socket.socket | None, number: int) -> None:
        with contextlib.suppress(OSError):  # it is gone, which is seen next
            if client is not None:
                client.sendall(_NUMBER.pack(number))


def _close(sock: socket.socket | None, descriptors: list[int]) -> None:
    if sock is not None:
        sock.close()
    for descriptor in descriptors:
        os.close(descriptor)
