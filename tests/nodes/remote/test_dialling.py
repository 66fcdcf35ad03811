"""Hosts that are dialled by names: a name server may be slow, or know nothing; nobody else waits for it."""

import os
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from remote_hosts import SHORT, dialled_host
from remote_rollouts import makers, rollout_over

from rollflow.nodes import RemoteEnvs, Rollout
from rollflow.nodes.remote.dial import reach
from rollflow.stream import EnvError
from rollflow.stream.bell import Bell
from rollflow.stream.wire import parse_address

Answer = Callable[[], list[tuple[str, int]]]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, Answer]:
    """What a name server says of names, which are asked for in a thread; numbers need none."""
    known: dict[str, Answer] = {}
    asked = socket.getaddrinfo
    testing = threading.current_thread()

    def found(host: str, port: int, *args: Any, flags: int = 0, **options: Any) -> Any:
        if host not in known:
            return asked(host, port, *args, flags=flags, **options)
        if flags & socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        assert threading.current_thread() is not testing
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in known[host]()]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    return known


def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def test_a_name_server_that_hangs_holds_nothing_up(names: dict[str, Answer], tmp_path: Path) -> None:
    asked, released = threading.Event(), threading.Event()

    def hang() -> list[tuple[str, int]]:
        asked.set()
        released.wait()
        return []

    names["slow.test"] = hang
    before = set(threading.enumerate())
    envs = RemoteEnvs.connect(["tcp://slow.test:1", f"unix:{tmp_path}/host"], secret="s", hosts=1, limits=SHORT)
    try:
        with dialled_host(f"unix:{tmp_path}/host", makers(0), secret="s"):
            with rollout_over(envs, num_fragments=5) as rollout:
                assert asked.wait(60)
                assert len(list(rollout.fragments())) == 5
                waited_for = rollout.environments._gateway.waited_for()
        assert "tcp://slow.test:1: no name server has said yet where this is" in waited_for
        [hanging] = set(threading.enumerate()) - before
        assert hanging.daemon
    finally:
        released.set()
    hanging.join()


def test_a_rollout_that_has_ended_leaves_nothing_of_a_lookup_behind(names: dict[str, Answer]) -> None:
    asked, released = threading.Event(), threading.Event()

    def hang() -> list[tuple[str, int]]:
        asked.set()
        released.wait()
        return [("127.0.0.1", 1)]

    names["slow.test"] = hang
    before, descriptors = set(threading.enumerate()), set(os.listdir("/proc/self/fd"))
    with pytest.raises(EnvError, match=r"0 of 1 hosts came within 0.2 s, dialling tcp://slow.test:1; "):
        Rollout(RemoteEnvs.connect("tcp://slow.test:1", secret="s", join_timeout=0.2))
    assert asked.is_set()
    released.set()  # its answer comes when nobody is there any more
    for thread in set(threading.enumerate()) - before:
        thread.join()
    assert set(os.listdir("/proc/self/fd")) == descriptors


def test_a_host_is_found_by_any_of_the_addresses_that_its_name_stands_for(names: dict[str, Answer]) -> None:
    port = unused_port()
    names["two.test"] = lambda: [("127.0.0.1", unused_port()), ("127.0.0.1", port)]
    with (
        dialled_host(f"tcp://127.0.0.1:{port}", makers(0), secret="s"),
        rollout_over(RemoteEnvs.connect(f"tcp://two.test:{port}", secret="s"), num_fragments=2) as rollout,
    ):
        assert len(list(rollout.fragments())) == 2


@pytest.mark.parametrize(
    ("name", "told"), [("nowhere.test", "Name or service not known"), ("a..b", "'a..b' is no name")]
)
def test_a_name_that_leads_nowhere_is_said_to(names: dict[str, Answer], name: str, told: str) -> None:
    def fail() -> list[tuple[str, int]]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    names["nowhere.test"] = fail
    with pytest.raises(EnvError, match=rf"0 of 1 hosts came within 0.5 s, dialling tcp://{name}:1; .*{told}"):
        Rollout(RemoteEnvs.connect(f"tcp://{name}:1", secret="s", join_timeout=0.5))


def test_what_is_not_wanted_any_more_is_not_waited_for() -> None:
    with ExitStack() as closing:
        silent = closing.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):  # then nobody else gets an answer
            waiting = closing.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(silent.getsockname())
        bell = Bell()
        closing.callback(bell.close)
        bell.ring()
        rings = iter([False, False, True])

        def is_over() -> bool:
            bell.ring()
            return next(rings)

        with pytest.raises(InterruptedError):
            reach(parse_address(f"tcp://127.0.0.1:{silent.getsockname()[1]}"), 0, bell, is_over)
        assert list(rings) == []
