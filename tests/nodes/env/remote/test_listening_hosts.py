"""Hosts that are dialled: who is served where several come, and who has to wait."""

import logging
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from held_envs import LONGEST_S
from numbered_module import NumberedModule
from raw_gateway import PATIENT, RawGateway
from remote_hosts import dialled_host, listening
from remote_rollouts import await_that, makers, rollout_over

from rollflow import RemoteEnvs, RemoteRollouts
from rollflow.nodes import EnvHost, RolloutHost
from rollflow.stream import wire
from rollflow.stream.data.errors import WireError

ACTIONS = np.zeros(1, np.int64)


@contextmanager
def listening_host(tmp_path: Path, **options: Any) -> Iterator[str]:
    address = f"unix:{tmp_path}/host"
    with dialled_host(address, makers(0), **{"limits": PATIENT, **options}):
        yield address


def served(address: str) -> tuple[RawGateway, wire.GatewaySession]:
    """A gateway that has taken the host in and has had the answer to a reset, so that it is no stranger any more."""
    gateway = RawGateway(address)
    session = gateway.welcome()
    assert gateway.ask(wire.Reset(0, 1, (1,), None)).number == 1
    return gateway, session


def test_the_oldest_of_many_strangers_has_to_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollflow.nodes.env.remote.host._MOST_STRANGERS", 2)
    with listening_host(tmp_path) as address:
        gateway, _ = served(address)
        strangers = []
        for _ in range(3):
            strangers.append(RawGateway(address))
            assert strangers[-1].sock.recv(1, socket.MSG_PEEK)  # its hello: it has been let in
        error = strangers[0].refusal()
        assert error.code == "busy"
        assert "2 connections have not proved themselves, expected fewer" in str(error)
        for stranger in strangers[1:]:
            assert stranger.hello().busy
            stranger.sock.close()
        gateway.ask(wire.Step(0, 2, ACTIONS))
        gateway.end()


def test_a_gateway_that_welcomes_a_busy_host_is_refused_and_the_other_goes_on(tmp_path: Path) -> None:
    with listening_host(tmp_path) as address:
        one = RawGateway(address)
        assert not one.hello().busy
        one.welcome()
        rows = one.ask(wire.Reset(0, 1, (1,), None))
        other = RawGateway(address)
        assert other.hello().busy
        other.welcome()
        error = other.refusal()
        assert error.code == "busy"
        assert "the host is busy with another gateway" in str(error)
        after = one.ask(wire.Step(0, 2, ACTIONS))
        assert (rows.number, after.number) == (1, 2)
        one.end()


def test_a_gateways_newer_connection_replaces_the_older(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with listening_host(tmp_path) as address:
        older, session = served(address)
        older.connection.ask(wire.Step(0, 2, ACTIONS))  # which is never sent
        newer = RawGateway(address)
        assert newer.hello().busy
        newer.welcome(session)
        assert newer.next_of(wire.Rows).number == 2
        assert older.sock.recv(1) == b""  # without a word
        older.sock.close()
        newer.ask(wire.Step(0, 3, ACTIONS))
        newer.end()
    assert "the gateway has come back, the connection from a Unix socket is closed" in caplog.text


def test_a_host_that_is_told_to_end_at_once_does_not_wait_for_its_goodbye_to_be_read(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/host"
    with EnvHost(makers(0)) as host, host.listening(address):
        thread = threading.Thread(target=host.serve)
        thread.start()
        gateway, _ = served(address)
        host.drain(60 * LONGEST_S)
        assert gateway.next_of(wire.Goodbye).drained
        try:
            host.drain(0.0)
            thread.join(LONGEST_S)
            assert not thread.is_alive()  # though the gateway has not closed
        finally:
            gateway.sock.close()


def test_a_gateway_that_is_gone_makes_room_at_once(tmp_path: Path) -> None:
    with listening_host(tmp_path) as address:
        for seed in range(3):
            gateway = RawGateway(address)
            assert not gateway.hello().busy
            gateway.welcome()
            gateway.ask(wire.Reset(0, 1, (seed,), None))
            gateway.sock.close()


@pytest.mark.parametrize(
    "said",
    [
        wire.encode(wire.Refused("session", "go away")),
        wire.encode(wire.Goodbye("it is over")),
        [b"GET / HTTP/1.1\r\n\r\n"],
    ],
)
def test_what_a_stranger_says_changes_nothing(said: list[bytes], tmp_path: Path) -> None:
    with listening_host(tmp_path) as address:
        gateway, session = served(address)
        stranger = RawGateway(address)
        stranger.sock.sendall(b"".join(said))
        while stranger.sock.recv(1 << 16):
            pass  # until the host has hung up
        stranger.sock.close()
        gateway.ask(wire.Step(0, 2, ACTIONS))
        gateway.sock.close()
        again = RawGateway(address)
        assert again.hello().session == session.token
        again.welcome(session)
        again.ask(wire.Step(0, 3, ACTIONS))
        again.end()


def test_who_was_offered_a_session_that_is_over_is_to_come_again(tmp_path: Path) -> None:
    with listening_host(tmp_path) as address:
        gateway, _ = served(address)
        early = RawGateway(address)
        offered = early.hello().session
        gateway.end()
        assert early.refusal().code == "session"
        late = RawGateway(address)
        hello = late.hello()
        assert not hello.busy
        assert hello.session != offered
        late.welcome()
        late.ask(wire.Reset(0, 1, (1,), None))
        late.end()


def test_a_listening_host_keeps_its_secret_while_it_dials_others_without_one(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/host"
    with EnvHost(makers(0)) as host, host.listening(address, secret="right"):
        with pytest.raises(WireError, match="not reached"):
            host.connect(f"unix:{tmp_path}/nobody", retry_s=0.0)
        thread = threading.Thread(target=host.serve)
        thread.start()
        try:
            assert "this host has one" in str(RawGateway(address).refusal())
        finally:
            host.stop()
            thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("is_dialled", [False, True])
@pytest.mark.parametrize("kind", [EnvHost, RolloutHost])
def test_a_host_that_is_closed_from_another_thread_returns_first(kind: Any, is_dialled: bool) -> None:
    options = {} if kind is EnvHost else {"module": NumberedModule()}
    of_rollout = RemoteEnvs if kind is EnvHost else RemoteRollouts
    host = kind(makers(0), **options)
    with ExitStack() as stack:
        if is_dialled:
            address = stack.enter_context(host.listening("tcp://127.0.0.1:0"))
            envs, serve = of_rollout.connect(str(address)), host.serve
        else:
            envs = listening(of_rollout)
            serve = partial(host.connect, str(envs.addresses[0]))
        served = stack.enter_context(ThreadPoolExecutor()).submit(serve)
        with rollout_over(envs) as rollout:
            next(iter(rollout.fragments()))
            host.close()
            assert served.result(60) in (None, "stopped")
            gateway = rollout.environments.gateway
            await_that(lambda: not gateway.hosts)
            host.close()  # does nothing
            host.stop()
