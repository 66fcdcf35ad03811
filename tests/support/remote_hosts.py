"""Hosts for tests, of environments and of whole rollouts, in threads and in processes, and a wire that breaks."""

import multiprocessing
import os
import random
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.context import ForkServerContext
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from numbered_env import NumberedEnv

from rollflow import RemoteEnvs
from rollflow.nodes import EnvHost, RolloutHost
from rollflow.nodes.env.remote.host import Host
from rollflow.nodes.env.remote.hosted_node import HostWait
from rollflow.nodes.env.remote.remote_envs import RemoteHosts
from rollflow.stream.data.errors import WireError
from rollflow.stream.wire import Connection, HostConnection, HostSession, Limits, Rows, Step, encode

Remote = TypeVar("Remote", bound=RemoteHosts)

SHORT = Limits(heartbeat_s=5.0, grace_s=30.0)


@contextmanager
def hosting(address: Any, envs: Any, *, kind: type[Host] = EnvHost, **options: Any) -> Iterator[Any]:
    """A host in a thread, until it is left; what it raised is raised then."""
    raised: list[BaseException] = []
    protection = _protection_of(options)
    with kind(envs, **options) as host:

        def serve() -> None:
            try:
                host.connect(str(address), retry_s=30.0, **protection)
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield host
        finally:
            host.stop()
            thread.join()
    for error in raised:
        raise error


@contextmanager
def dialled_host(address: str, envs: Any, *, kind: type[Host] = EnvHost, **options: Any) -> Iterator[Any]:
    """A host in a thread that is to be dialled."""
    protection = _protection_of(options)
    with kind(envs, **options) as host, serving(host, address, **protection):
        yield host


def _protection_of(options: dict[str, Any]) -> dict[str, Any]:
    """Those of a host's options that its connections take, which are taken out."""
    return {name: options.pop(name) for name in ("secret", "tls", "limits") if name in options}


@contextmanager
def serving(host: Host, address: str, **protection: Any) -> Iterator[str]:
    """A host that listens, in a thread, which it does until the end: where."""
    with host.listening(address, **protection) as where:
        thread = threading.Thread(target=host.serve)
        thread.start()
        try:
            yield str(where)
            assert thread.is_alive()
        finally:
            host.stop()
            thread.join()


def forked() -> ForkServerContext:
    """Processes that need not import anything again: there may be hundreds, one after the other."""
    context = multiprocessing.get_context("forkserver")
    slow_imports = ["anyio.from_thread", "rollflow.nodes.rollout.rollout", "rollflow.sinks"]
    context.set_forkserver_preload(slow_imports)
    return context


class HostProcess:
    """A host in a process of its own: environments `env(*args, **kwargs)`, one for each of `makers`.

    kind        `RolloutHost`: it has a `NumberedModule`, or as many as `feeding_rollouts` has for several agents
    has_agents  whether the environments have several agents
    """

    def __init__(
        self,
        address: Any,
        makers: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
        *,
        env: type[Any] = NumberedEnv,
        kind: type[Host] = EnvHost,
        has_agents: bool = False,
        **options: Any,
    ) -> None:
        envs = [partial(env, *args, **kwargs) for args, kwargs in makers]
        host = partial(kind, envs, **{"name": "process", **options})
        self.process = forked().Process(target=_serve, args=(str(address), host, kind is RolloutHost, has_agents))
        self.process.start()

    def signal(self, number: int) -> None:
        """Send a signal."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> None:
        """Kill it if it is still there."""
        self.process.kill()
        self.process.join()


def _serve(address: str, kind: Callable[..., Host], acts: bool, has_agents: bool) -> None:
    """Serve a gateway, with modules if the host acts."""
    from feeding_rollouts import module_of, modules_of_agents  # which has imports of its own from here
    from numbered_module import NumberedModule

    torch.set_num_threads(1)
    of_agents = {"module": modules_of_agents(), "agent_to_module_mapping_fn": module_of}
    acting: dict[str, Any] = {} if not acts else of_agents if has_agents else {"module": NumberedModule()}
    with kind(**acting) as host:
        host.connect(address, retry_s=30.0)


class BrokenWire:
    """A proxy that cuts each connection after a number of bytes that `drawn` gives; None: never.

    is_down    whether connections are closed as they come
    given      bytes that the target has sent
    """

    def __init__(self, target: Any, drawn: Callable[[], int | None]) -> None:
        self.cuts = self.given = 0
        self._target, self._drawn = (target.host, target.port), drawn
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._is_closed = self.is_down = False
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def address(self) -> str:
        """Return an address to dial instead."""
        return f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        """Cut what is there, and listen no more."""
        self._is_closed = True
        with socket.create_connection(self._listener.getsockname()):
            pass  # so that it looks
        self.go_down()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def move_to(self, target: Any) -> None:
        """Have what comes go to another address."""
        self._target = target.host, target.port

    def go_down(self) -> None:
        """Cut what is there; what comes is cut as well, until `is_down` is set otherwise."""
        self.is_down = True
        with self._lock:
            for sock in self._open:
                _cut(sock)

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            if self._is_closed:
                near.close()
                return
            if self.is_down:
                near.close()
                continue
            try:
                far = socket.create_connection(self._target)
            except OSError:
                near.close()
                continue
            left = [self._drawn()]
            with self._lock:
                self._open |= {near, far}
            for here, there in ((near, far), (far, near)):
                thread = threading.Thread(target=self._pass_on, args=(here, there, left))
                thread.start()
                self._threads.append(thread)

    def _pass_on(self, here: socket.socket, there: socket.socket, left: list[int | None]) -> None:
        try:
            is_target = here.getpeername()[1] == self._target[1]
            while data := here.recv(1 << 16):
                self.given += len(data) * is_target
                with self._lock:
                    most = left[0]
                    if most is not None:
                        data, left[0] = data[:most], most - len(data)
                there.sendall(data)
                if left[0] is not None and left[0] <= 0:
                    self.cuts += 1
                    break
        except OSError:
            pass
        for sock in (here, there):
            _cut(sock)
        with self._lock:
            self._open -= {here, there}
        here.close()


def _cut(sock: socket.socket) -> None:
    try:
        if random.random() < 0.5:  # a reset rather than an orderly end
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


def listening(kind: type[Remote] = RemoteEnvs, **options: Any) -> Remote:  # type: ignore[assignment]
    """Remote environments, or whole rollouts, on a port of this machine's."""
    return kind.listen("tcp://127.0.0.1:0", **{"limits": SHORT, "join_timeout": 60.0, **options})


def end_waits_once(monkeypatch: pytest.MonkeyPatch, condition: Callable[[], bool]) -> None:
    """Have every wait for hosts be over once a condition holds, whatever the time."""
    monkeypatch.setattr(HostWait, "is_over", property(lambda _: condition()))


class RawEnd:
    """An end of a connection made by hand, to misbehave."""

    def __init__(self, sock: socket.socket, connection: Connection) -> None:
        self.sock, self.connection = sock, connection
        self._events: deque[Any] = deque()

    def flush(self) -> None:
        """Send what the connection has to send."""
        for buffer in self.connection.outgoing():
            self.sock.sendall(buffer)

    def next_event(self) -> Any:
        """Wait for the connection's next event; None when the other end has hung up."""
        while not self._events:
            self.flush()
            data = self.sock.recv(1 << 16)
            if not data:
                self.connection.ended()
                return None
            self._events += self.connection.receive(data, 0.0)
        return self._events.popleft()

    def next_of(self, kind: type[Any]) -> Any:
        """Wait for the next event of a kind."""
        while not isinstance(event := self.next_event(), kind):
            assert not isinstance(event, WireError | None), event
        return event

    def refusal(self) -> WireError:
        """Wait until this end is refused: what the other says."""
        error: WireError = self.next_of(WireError)
        assert self.sock.recv(1) == b""
        self.sock.close()
        return error


class RawHost(RawEnd):
    """A host made by hand, to misbehave: says its Hello, and gives requests one by one; its one lane has two slots.

    env    makes an environment of a slot, numbered as no other is
    """

    def __init__(
        self,
        address: Any,
        *,
        secret: bytes | None = None,
        kind: type[Host] = EnvHost,
        env: Callable[[int], Any] = NumberedEnv,
        **said: Any,
    ) -> None:
        makers = [lambda slot=slot: env(900 + slot) for slot in range(2)]
        with kind(makers, name="raw") as pattern:  # type: ignore[call-arg]
            self.hello = replace(pattern._hello(), **said)
        connection = HostConnection(self.hello, HostSession(self.hello.session), secret=secret, limits=SHORT, now=0.0)
        super().__init__(socket.create_connection((address.host, address.port)), connection)

    def rows(self, request: Any, **changed: Any) -> Rows:
        """An answer with two slots of zeros, but for what is changed."""
        is_step = isinstance(request, Step)
        flags = np.zeros(2, bool) if is_step else None
        fields: dict[str, Any] = {"lane": request.lane, "number": request.number, "obs": np.zeros((2, 3), np.int64)}
        fields |= {"rewards": np.zeros(2) if is_step else None, "terminateds": flags, "truncateds": flags}
        fields |= {"final_slots": (), "final_obs": None, "infos": {}, "final_infos": {}}
        return Rows(**fields | changed)

    def answer(self, request: Any) -> None:
        """Answer as the protocol wants it."""
        self.connection.answer(request, self.rows(request))
        self.flush()

    def send(self, message: Any) -> None:
        """Send a message, whatever the protocol says of it."""
        for buffer in encode(message):
            self.sock.sendall(buffer)
