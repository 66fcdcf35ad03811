"""Fork server: a process that has imported what hosts import, and from which each program is forked off in a moment.

Processes of one user that would import the same share one, such as the actors that Ray has on a node: an import of
torch takes more than a second of a core, and memory, each time. It is started by whoever needs it first, and ends with
its last program. Programs go on without it.

A client connects, and both check that the other end is of the same user and container. Then

    server -> client    a byte, once all is imported
    client -> server    an order: the length of its JSON, i32, with the descriptors; the JSON
    server -> client    the number of the program's process, i32; -1: the server refuses, and has forked off nothing
    server -> client    the program's exit code, i32, negative for a signal, once it has ended

The process keeps its number until the client has closed the connection.
"""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rollflow.nodes.closing import closing_on_error
from rollflow.stream.data.system import system_module

resource = system_module("resource")

NUMBER = struct.Struct("<i")
STARTED_WITHIN_S = 60.0  # and asked for the first time
_CREDENTIALS = struct.Struct("3i")
_PRELOADED = ("rollflow.nodes.offloaded.rollout_host",)  # by name: it imports nearly all there is
_NAMESPACES = ("mnt", "pid", "user")
_MOST_DESCRIPTORS = 16


@dataclass(slots=True, eq=False)
class _Client:
    """Client, and the program that it has asked for.

    sock           closed once it has gone
    order          what has come of it
    descriptors    that came with it
    pid, end       of the program, and a descriptor that can be read once it has ended; 0, -1: it is not there yet
    has_ended      whether the client was told its code
    """

    sock: socket.socket
    order: bytearray = field(default_factory=bytearray)
    descriptors: list[int] = field(default_factory=list)
    pid: int = 0
    end: int = -1
    has_ended: bool = False

    @property
    def waited_for(self) -> Iterator[int]:
        """Descriptors at which there may be something to do."""
        if self.sock.fileno() >= 0:
            yield self.sock.fileno()
        if self.pid and not self.has_ended:
            yield self.end

    def tell(self, number: int) -> None:
        with contextlib.suppress(OSError):  # it has gone, which is seen next
            self.sock.sendall(NUMBER.pack(number))

    def drop_descriptors(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []


class ForkServer:
    """Server of a listening socket, whose descriptor it is given."""

    def __init__(self, listener: int) -> None:
        self._listener = socket.socket(fileno=listener)
        self._listener.listen(socket.SOMAXCONN)  # again: clients see the process that did so last
        self._listener.setblocking(False)
        self._clients: list[_Client] = []
        self._limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    def serve(self) -> tuple[str, list[int]]:
        """Import, and fork off what is asked for, until the last client has gone: the process ends then.

        Returns in each process that is forked off: its program, and its descriptors.
        """
        for name in _PRELOADED:
            importlib.import_module(name)
        self._can_fork = len(os.listdir("/proc/self/task")) == 1  # else a thread may hold a lock at a fork
        self._imported = _times_of_modules()
        gc.collect()
        gc.freeze()  # collections would copy the memory that is shared
        resource.setrlimit(resource.RLIMIT_NOFILE, (self._limits[1], self._limits[1]))
        patience_ms = STARTED_WITHIN_S * 1e3
        while ready := self._ready(patience_ms):
            for client in list(self._clients):
                if client.end in ready and client.pid:
                    self._tell_end(client)
                if client.sock.fileno() in ready and self._heard(client):
                    return self._become(client)
                if client.sock.fileno() < 0 and (client.has_ended or not client.pid):
                    self._forget(client)
            if self._listener.fileno() in ready:
                self._accept()
            patience_ms = 0
        os._exit(0)

    def _ready(self, patience_ms: float) -> set[int]:
        """Descriptors where there is something to do; without a client, none after this time."""
        poll = select.poll()
        for descriptor in [self._listener.fileno(), *(each for client in self._clients for each in client.waited_for)]:
            poll.register(descriptor, select.POLLIN)
        return {descriptor for descriptor, _ in poll.poll(None if self._clients else patience_ms)}

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it has gone, or is nobody of ours, or there is no room for it
            sock, _ = self._listener.accept()
            with closing_on_error(sock.close):
                check_other(sock)
                sock.sendall(b"\n")
                sock.setblocking(False)
            self._clients.append(_Client(sock))

    def _heard(self, client: _Client) -> bool:
        """Take what a client says. True in the process that is forked off for it."""
        try:
            data, descriptors, _, _ = socket.recv_fds(client.sock, 1 << 16, _MOST_DESCRIPTORS)
        except BlockingIOError:
            return False
        except OSError:
            data, descriptors = b"", []
        client.descriptors += descriptors
        client.order += data
        size = NUMBER.size
        if not data:
            client.sock.close()
        elif not client.pid and len(client.order) >= size + NUMBER.unpack_from(client.order)[0]:
            return self._fork(client)
        return False

    def _fork(self, client: _Client) -> bool:
        """Fork off what a client has ordered. True in the process that is forked off."""
        pid = -1
        if self._can_fork and _times_of_modules() == self._imported:  # else it would have what was installed before
            with contextlib.suppress(OSError):  # there is no room for it
                pid = os.fork()
        if not pid:
            return True
        client.drop_descriptors()
        if pid > 0:
            with contextlib.suppress(OSError):  # it has done so itself
                os.setpgid(pid, pid)
            try:
                client.pid, client.end = pid, os.pidfd_open(pid)
            except OSError:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        client.tell(client.pid or -1)
        return False

    def _become(self, client: _Client) -> tuple[str, list[int]]:
        """Turn this process into the program of a client: without what is the server's, with its own variables."""
        with contextlib.suppress(OSError):  # the server has done so
            os.setpgid(0, 0)
        self._listener.close()
        for each in self._clients:
            each.sock.close()
            if each.end >= 0:
                os.close(each.end)
            if each is not client:
                each.drop_descriptors()
        resource.setrlimit(resource.RLIMIT_NOFILE, self._limits)
        order: dict[str, Any] = json.loads(client.order[NUMBER.size :])
        os.environ.clear()
        os.environ.update(order["environment"])
        for name, module in (("numpy", "numpy.random"), ("torch", "torch")):
            if name in sys.modules:
                importlib.import_module(module).seed()  # else all programs would draw the same
        return order["program"], client.descriptors

    def _tell_end(self, client: _Client) -> None:
        """Tell a client the code of its program. Its number is taken until the client has gone."""
        status = os.waitid(os.P_PID, client.pid, os.WEXITED | os.WNOWAIT)
        assert status is not None  # as it waits
        client.has_ended = True
        client.tell(status.si_status if status.si_code == os.CLD_EXITED else -status.si_status)

    def _forget(self, client: _Client) -> None:
        client.drop_descriptors()
        if client.pid:
            os.waitpid(client.pid, 0)
            os.close(client.end)
        self._clients.remove(client)


def _times_of_modules() -> dict[str, float]:
    """When the files of rollflow's modules were written that are imported."""
    files = [module.__file__ for name, module in list(sys.modules.items()) if name.startswith("rollflow.")]
    times = {}
    for file in filter(None, files):
        with contextlib.suppress(OSError):  # it has been taken away
            times[file] = os.stat(file).st_mtime
    return times


def check_other(other: socket.socket) -> None:
    """Raise PermissionError where the other end is another user's, or of another container."""
    pid, user, _ = _CREDENTIALS.unpack(other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user != os.getuid() or not pid or namespaces(str(pid)) != namespaces("self"):
        raise PermissionError(
            f"process {pid} of user {user} is at the other end, expected one of this user and container"
        )


def namespaces(pid: str) -> list[str]:
    """Names of the namespaces of a process, by its number or "self". Raises OSError where they can't be seen."""
    return [os.readlink(f"/proc/{pid}/ns/{kind}") for kind in _NAMESPACES]
