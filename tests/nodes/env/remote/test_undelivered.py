"""Peers that do not read: the connection breaks once too much waits for them, and the next one goes on."""

from pathlib import Path

import numpy as np
import pytest
from raw_gateway import RawGateway
from remote_hosts import RawHost, dialled_host
from remote_rollouts import makers

from rollflow import RemoteRollouts
from rollflow.nodes.env.remote.gateway import Gateway, HostEvent
from rollflow.stream.data.errors import WireError
from rollflow.stream.wire import Fragment, Limits, Ping, Reset, Rows, Step, Turn, Weights, Welcome, encode

LARGE = np.zeros(8 << 20, np.uint8)  # more than sockets take while nobody reads
ONE_WAITS = Limits(undelivered=12 << 20, handshake_s=250.0, heartbeat_s=250.0)


@pytest.mark.slow
def test_a_host_that_does_not_read_is_given_up_and_the_next_connection_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[str] = []
    fail = Gateway.fail

    def seen(self: Gateway, peer: object, error: WireError, now: float) -> None:
        codes.append(error.code)
        fail(self, peer, error, now)  # type: ignore[arg-type]

    monkeypatch.setattr(Gateway, "fail", seen)
    gateway = Gateway(RemoteRollouts.listen("tcp://127.0.0.1:0", limits=ONE_WAITS), "rollout")
    [address] = gateway._envs.addresses
    raw = RawHost(address, role="rollout")
    raw.next_of(Welcome)
    [host] = gateway.hosts.values()
    gateway.ask(Turn(0, 1))
    assert gateway.tell(host, Weights(1, {"w": LARGE}, {}, {}), host.connection)
    assert gateway.is_behind(host)
    assert not gateway.tell(host, Weights(2, {"w": LARGE}, {}, {}), host.connection)
    assert codes == ["undelivered"]
    assert "bytes not delivered yet and 8388" in host.reason
    assert list(gateway.hosts.values()) == [host]
    raw.sock.close()

    again = RawHost(address, role="rollout", session=raw.hello.session)
    assert again.next_of(Welcome).resumed
    turn = again.next_of(Turn)
    assert turn.number == 1
    assert gateway.tell(host, Weights(2, {"w": LARGE}, {}, {}), host.connection)
    assert again.next_of(Weights).version == 2
    again.connection.answer(turn, Fragment(0, 1, {"w": np.arange(3)}, {}))
    again.flush()
    answers: list[HostEvent] = []
    while not answers:
        gateway.wait(None)
        gateway.service()
        answers += [news for news in gateway.news() if news.kind == "answered"]
    assert [news.what.number for news in answers] == [1]
    again.sock.close()
    gateway.close()


def test_a_gateway_that_does_not_read_is_given_up_and_the_next_connection_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = f"unix:{tmp_path}/host"
    little = Limits(undelivered=1 << 14, handshake_s=250.0, heartbeat_s=250.0)
    with dialled_host(address, makers(0, lengths=(50, 60)), limits=little):
        deaf = RawGateway(address)
        session = deaf.welcome()
        deaf.ask(Reset(0, 1, (1,), None))
        deaf.connection.ask(Step(0, 2, np.zeros(1, np.int64)))
        deaf.flush()
        pings = b"".join(b"".join(encode(Ping(number))) for number in range(1, 1000))
        with pytest.raises(OSError, match=r"Broken pipe|reset by peer"):
            while True:  # each is answered, and no answer is read
                deaf.sock.sendall(pings)
        deaf.sock.close()
        again = RawGateway(address)
        assert again.hello().session == session.token
        again.welcome(session)
        rows = again.next_of(Rows)
        assert rows.number == 2
        assert rows.obs[0, 2] == 1  # it was stepped once
        after = again.ask(Step(0, 3, np.zeros(1, np.int64)))
        assert after.obs[0, 2] == 2
        again.end()
    problem, back = [each.getMessage() for each in caplog.records if each.name == "rollflow.nodes.env.remote.host"]
    assert "bytes not delivered yet and 32 more, expected at most 16384" in problem
    assert "the gateway is connected again" in back
