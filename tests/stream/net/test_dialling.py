"""Hosts that are dialled by names: a name server may be slow, or know nothing; nobody else waits for it."""

import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from leftovers import nothing_left
from numbered_module import NumberedModule
from remote_hosts import SHORT, dialled_host, end_waits_once
from remote_rollouts import await_that, makers, rollout_over

from rollflow import RemoteEnvs, Rollout, feed
from rollflow.nodes import EnvHost
from rollflow.nodes.env.remote.hosted_node import HostWait
from rollflow.stream import EnvError
from rollflow.stream.data.errors import WireError
from rollflow.stream.net.dial_wait import DialWait
from rollflow.stream.net.dialler import dial
from rollflow.stream.wire import Limits, parse_address

Answer = Callable[[], list[tuple[str, int]]]


class Hanging:
    """An answer of a name server that does not come until it is released."""

    def __init__(self) -> None:
        self.asked, self.released = threading.Event(), threading.Event()

    def __call__(self) -> list[tuple[str, int]]:
        self.asked.set()
        self.released.wait()
        return [("127.0.0.1", 1)]


def unknown() -> list[tuple[str, int]]:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


@pytest.fixture
def hang() -> Iterator[Hanging]:
    hang = Hanging()
    yield hang
    hang.released.set()


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, Answer]:
    """Table of names for a name server, which is asked in a thread; numbers need none."""
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


def test_a_name_server_that_hangs_holds_nothing_up(names: dict[str, Answer], hang: Hanging, tmp_path: Path) -> None:
    names["slow.test"] = hang
    before = set(threading.enumerate())
    envs = RemoteEnvs.connect(["tcp://slow.test:1", f"unix:{tmp_path}/host"], secret="s", hosts=1, limits=SHORT)
    with dialled_host(f"unix:{tmp_path}/host", makers(0), secret="s"):
        with rollout_over(envs, num_fragments=5) as rollout:
            assert hang.asked.wait(60)
            assert len(list(rollout.fragments())) == 5
            waited_for = rollout.environments.gateway.waited_for()
    assert "tcp://slow.test:1: no name server has said yet where this is" in waited_for
    [hanging] = set(threading.enumerate()) - before
    assert hanging.daemon
    hang.released.set()
    hanging.join()


@pytest.mark.slow
@nothing_left()
def test_a_rollout_that_has_ended_leaves_nothing_of_a_lookup_behind(
    names: dict[str, Answer], hang: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    names["slow.test"] = hang
    end_waits_once(monkeypatch, hang.asked.is_set)
    with pytest.raises(EnvError, match=r"0 of 1 hosts came within 60 s, dialling tcp://slow.test:1; "):
        Rollout(RemoteEnvs.connect("tcp://slow.test:1", secret="s", join_timeout=60.0))
    hang.released.set()  # its answer comes when nobody is there any more


def test_a_host_is_found_by_any_of_the_addresses_that_its_name_stands_for(names: dict[str, Answer]) -> None:
    port = unused_port()
    names["two.test"] = lambda: [("127.0.0.1", unused_port()), ("127.0.0.1", port)]
    with (
        dialled_host(f"tcp://127.0.0.1:{port}", makers(0), secret="s"),
        rollout_over(RemoteEnvs.connect(f"tcp://two.test:{port}", secret="s"), num_fragments=2) as rollout,
    ):
        assert len(list(rollout.fragments())) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "told"), [("nowhere.test", "Name or service not known"), ("a..b", "'a..b' is no name")]
)
def test_a_name_that_leads_nowhere_is_said_to(
    names: dict[str, Answer], name: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names["nowhere.test"] = unknown
    said: list[str] = []
    monkeypatch.setattr(HostWait, "remind", lambda _, state, where: said.append(where))
    end_waits_once(monkeypatch, lambda: bool(said) and told in said[-1])
    with pytest.raises(EnvError, match=rf"0 of 1 hosts came within 60 s, dialling tcp://{name}:1; .*{told}"):
        Rollout(RemoteEnvs.connect(f"tcp://{name}:1", secret="s", join_timeout=60.0))


def given_up(retry_s: float, dial: Callable[..., Any], caplog: pytest.LogCaptureFixture, problem: str) -> None:
    """Dial a name in vain: it is said what is done and for how long, again and again, and it ends in time."""
    with pytest.raises(WireError, match=rf"tcp://name.test:1 not reached for {retry_s:g} s: {problem}"):
        dial("tcp://name.test:1", retry_s=retry_s)
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("waiting")]
    assert re.match(rf"waiting(: | for \d+ s: )(gateway|trainer) tcp://name.test:1: {problem}; it is dialled", said[0])
    assert all(re.search(r"; it is dialled again for \d+ s more \(retry_s, or --retry\)$", line) for line in said)
    assert any(line.startswith("waiting for ") for line in said[:3])


def dialled_by_a_host(address: str, retry_s: float, limits: Limits | None = None) -> None:
    with EnvHost(makers(0)) as host:
        host.connect(address, secret="s", limits=limits, retry_s=retry_s)


def dialled_by_a_rollout(address: str, retry_s: float, limits: Limits | None = None) -> None:
    rollout = Rollout(makers(0), module=NumberedModule())
    feed(rollout, address, secret="s", retry_s=retry_s, limits=limits)


@pytest.mark.wait_times(first_word_s=0.02, reach_s=0.1, look_s=0.05)
@pytest.mark.parametrize("dial", [dialled_by_a_host, dialled_by_a_rollout])
@pytest.mark.parametrize("hangs", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["hangs", "unknown"])
def test_a_name_that_does_not_resolve_is_dialled_no_longer_than_was_said(
    hangs: bool, dial: Callable[..., Any], names: dict[str, Answer], hang: Hanging, caplog: pytest.LogCaptureFixture
) -> None:
    names["name.test"] = hang if hangs else unknown
    problem = "no (answer yet|name server has said yet where this is)" if hangs else "Name or service not known"
    given_up(0.5, dial, caplog, problem)


@pytest.mark.wait_times(reach_s=0.0, look_s=0.05)
@pytest.mark.parametrize("dial", [dialled_by_a_host, dialled_by_a_rollout])
def test_a_handshake_that_is_going_on_is_not_cut_off(dial: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(WireError, match=r"not reached for 0.2 s: .*the handshake is not over after 0.4 s"):
            dial(address, retry_s=0.2, limits=Limits(handshake_s=0.4))


@pytest.mark.wait_times(first_word_s=0.0)
def test_behind_an_orderly_end_nothing_is_awaited_before_an_attempt_fails(caplog: pytest.LogCaptureFixture) -> None:
    wait = DialWait("trainer", parse_address("tcp://name.test:1"), 60.0)
    wait.connected()
    wait.check(["tcp://name.test:1: trainer tcp://name.test:1 said goodbye"])
    assert caplog.records == []
    wait.failed("it is gone")
    wait.check([])
    assert "waiting: it is gone; it is dialled again for 60 s more" in caplog.text


@pytest.mark.parametrize("asks", [True, False], ids=["for a name", "for an answer"])
def test_a_host_that_dials_in_vain_can_be_stopped(names: dict[str, Answer], hang: Hanging, *, asks: bool) -> None:
    names["slow.test"] = hang
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as silent,
        ExitStack() as closing,
        EnvHost(makers(0)) as host,
        ThreadPoolExecutor(1) as threads,
    ):
        for _ in range(4):  # then nobody else gets an answer
            waiting = closing.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(silent.getsockname())
        address = "tcp://slow.test:1" if asks else f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        connected = threads.submit(host.connect, address, secret="s", retry_s=None)
        await_that(lambda: hang.asked.is_set() if asks else host._loop.dialler._calling)
        host.stop()
        try:
            assert connected.result(60) == "stopped"
        finally:
            hang.released.set()


def test_a_socket_that_can_not_be_connected_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = socket.socket(socket.AF_UNIX)
    monkeypatch.setattr(socket, "socket", lambda *kind: made)
    with pytest.raises(FileNotFoundError):
        dial((socket.AF_UNIX, socket.SOCK_STREAM, 0, "", str(tmp_path / "nobody")))
    assert made.fileno() == -1
