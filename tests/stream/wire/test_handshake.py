"""Handshake: two ends come to trust each other, or say why they don't."""

import hashlib
import hmac
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, strategies as st
from wire_ends import Ends, allocated, check_broken, error_of, frame_as, greeted, refusing, running, taken_from, told_by
from wire_messages import GATEWAY_NONCE, SECRET, TOKEN, hello

from rollflow.stream import wire
from rollflow.stream.data.errors import WireError
from rollflow.stream.wire.codec.handshake import GATEWAY, prove


@pytest.mark.parametrize("secret", [None, SECRET])
def test_two_ends_with_one_secret_or_none_come_together(secret: bytes | None) -> None:
    ends = running(host_secret=secret, gateway_secret=secret)
    assert ends.host.phase is ends.gateway.phase is wire.ConnectionPhase.RUNNING
    assert ends.host_session.token == TOKEN


def test_the_secret_is_not_sent_and_the_proofs_are_those_of_the_documentation() -> None:
    ends = Ends()
    hello_frame = taken_from(ends.host)
    ends.gateway.receive(hello_frame, 0.0)
    challenge_frame = taken_from(ends.gateway)
    ends.host.receive(challenge_frame, 0.0)
    proof_frame = taken_from(ends.host)
    transcript = hashlib.sha256(hello_frame + challenge_frame).digest()
    assert wire.decode(proof_frame).mac == hmac.new(SECRET, b"rollflow host" + transcript, "sha256").digest()  # type: ignore[union-attr]
    ends.gateway.receive(proof_frame, 0.0)
    ends.gateway.welcome(wire.GatewaySession(TOKEN, hello(), (0, 1), (0, 2)))
    welcome_frame = taken_from(ends.gateway)
    assert wire.decode(welcome_frame).mac == hmac.new(SECRET, b"rollflow gateway" + transcript, "sha256").digest()  # type: ignore[union-attr]
    assert SECRET not in hello_frame + challenge_frame + proof_frame + welcome_frame


@pytest.mark.parametrize(
    ("host_secret", "gateway_secret", "told"),
    [
        (b"other", SECRET, "proof.mac: the host has another secret, or somebody has changed what it said"),
        (None, SECRET, "the gateway asks for a secret, and this host has none"),
        (SECRET, None, "the gateway asks for no secret, and this host has one"),
    ],
)
def test_secrets_that_differ_are_told_both(host_secret: bytes | None, gateway_secret: bytes | None, told: str) -> None:
    ends = Ends(host_secret=host_secret, gateway_secret=gateway_secret)
    errors = [
        event
        for _ in range(3)
        for event in [*ends.to_gateway(), *ends.to_host()]
        if isinstance(event, wire.ConnectionBroken)
    ]
    assert len(errors) == 2
    for broken in errors:
        assert told in str(broken.error)
        assert broken.error.code == "secret"
    assert not ends.host.is_open
    assert not ends.gateway.is_open


@pytest.mark.parametrize(
    ("mac_of", "token", "code", "told"),
    [
        (lambda ends: bytes(32), TOKEN, "secret", "welcome.mac: the gateway does not know the secret"),
        (lambda ends: wire.decode(taken_from(ends.host)).mac, TOKEN, "secret", "the gateway does not know the secret"),
        (
            lambda ends: prove(SECRET, GATEWAY, ends.gateway._transcript),
            bytes(16),
            "session",
            "welcome.session is not the one in the hello",
        ),
    ],
    ids=["no proof", "the host's own proof", "another session"],
)
def test_a_welcome_is_refused_that_is_not_for_this_host_by_its_gateway(
    mac_of: Callable[[Ends], bytes], token: bytes, code: str, told: str
) -> None:
    ends = Ends()
    ends.to_gateway()
    ends.to_host()
    lanes = wire.GatewaySession(TOKEN, hello(), (0, 1), (0, 2)).grants()
    error = error_of(ends.host.receive(frame_as(wire.Welcome(mac_of(ends), token, False, 0, lanes)), 0.0))
    assert told in str(error)
    assert ends.host_session.send is None
    assert told_by(ends.host).code == code


@given(st.data())
def test_whoever_changes_the_hello_or_the_challenge_on_its_way_is_found_out(data: st.DataObject) -> None:
    ends = Ends()
    of_host = data.draw(st.booleans())
    frame = bytearray(taken_from(ends.host))
    if not of_host:
        ends.gateway.receive(frame, 0.0)
        frame = bytearray(taken_from(ends.gateway))
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] ^= data.draw(st.integers(1, 255))
    (ends.gateway if of_host else ends.host).receive(frame, 0.0)
    ends.to_host()
    assert not any(isinstance(event, wire.Hello) for event in ends.to_gateway())


@pytest.mark.parametrize(
    ("changed", "code", "told"),
    [
        ({"versions": (2, 3)}, "version", "hello.versions is 2 to 3, expected some with 1"),
        ({"slots": ()}, "message", "hello.slots is empty"),
    ],
)
def test_a_hello_that_can_not_be_met_is_refused_by_host_name(changed: dict[str, Any], code: str, told: str) -> None:
    ends = Ends()
    events = ends.gateway.receive(frame_as(hello(**changed)), 0.0)
    with refusing(code, f"^host 'sim-1': {told}"):
        raise error_of(events)
    refused = told_by(ends.gateway)
    assert refused.code == code
    (broken,) = ends.host.receive(frame_as(refused), 0.0)
    assert isinstance(broken, wire.ConnectionBroken)
    assert broken.error.code == code
    assert str(broken.error).startswith(f"gateway: refuses: {refused.text}")


def test_spaces_are_read_once_their_host_has_proved_itself() -> None:
    said = hello(observation_space={"kind": "Text"})
    with pytest.raises(WireError, match=r"hello.observation_space is .*, expected a space"):
        Ends(said=said)
    gateway = Ends(gateway_secret=None).gateway
    assert gateway.receive(frame_as(said), 0.0) == []
    with refusing("spaces", "^host 'sim-1': hello.observation_space is "):
        raise error_of(gateway.receive(frame_as(wire.Proof(b"")), 0.0))


def test_a_gateway_of_another_version_is_refused() -> None:
    ends = Ends()
    ends.to_gateway()
    challenge = wire.Challenge(2, "later", GATEWAY_NONCE, True, 1 << 20, 1.0, 1.0)
    error = error_of(ends.host.receive(frame_as(challenge), 0.0))
    assert str(error) == "gateway: challenge.version is 2, expected 1 to 1"


@pytest.mark.parametrize(
    "message", [wire.Ping(1), wire.Proof(b""), wire.Reset(0, 1, None, None), wire.Welcome(b"", TOKEN, False, 0, ())]
)
def test_a_message_out_of_turn_is_refused(message: wire.Message) -> None:
    for connection in (Ends().host, Ends().gateway):
        check_broken(connection.receive(frame_as(message), 0.0), "order", f"{message.kind} in the handshake")
        assert told_by(connection).code == "order"


def test_nothing_is_taken_of_a_host_before_its_welcome() -> None:
    ends = greeted()
    error = error_of(ends.gateway.receive(frame_as(wire.Proof(bytes(32))), 0.0))
    assert "proof in the handshake, expected nothing before the welcome" in str(error)


def test_the_handshake_has_a_time_limit_at_both_ends() -> None:
    ends = Ends(limits=wire.Limits(handshake_s=5), now=100.0)
    ends.to_gateway()
    for connection in (ends.host, ends.gateway):
        assert connection.next_deadline() == 105.0
        assert connection.tick(104.9) == []
        check_broken(connection.tick(105.0), "handshake", "the handshake is not over after 5 s")
        assert connection.next_deadline() is None
        assert told_by(connection).code == "handshake"


def test_a_host_comes_back_to_its_session_and_a_stranger_does_not() -> None:
    ends = running()
    token = ends.host_session.token
    again = greeted(host_session=ends.host_session)
    assert again.gateway.hello is not None
    assert again.gateway.hello.session == token == TOKEN
    with pytest.raises(WireError, match="the session is not the one that the host named"):
        again.gateway.welcome(wire.GatewaySession(bytes(16), again.gateway.hello, (5, 6), (0, 2)))
    again.gateway.welcome(wire.GatewaySession(TOKEN, again.gateway.hello, (5, 6), (0, 2)))
    (welcome,) = again.to_host()
    assert isinstance(welcome, wire.Welcome)
    assert not welcome.resumed


def test_a_busy_host_takes_no_welcome_but_one_to_go_on() -> None:
    before = running()
    other = greeted(host_session=before.host_session)
    other.host.is_busy = True
    other.gateway.welcome(wire.GatewaySession(TOKEN, hello(), (0, 1), (0, 2)))
    check_broken(other.to_host(), "busy", "the host is busy with another gateway")
    assert told_by(other.host).code == "busy"
    same = greeted(host_session=before.host_session)
    same.host.is_busy = True
    assert before.session is not None
    same.gateway.welcome(before.session)
    (welcome,) = same.to_host()
    assert isinstance(welcome, wire.Welcome)
    assert welcome.resumed


def test_little_is_taken_of_an_end_that_has_not_proved_itself() -> None:
    ends = Ends(limits=wire.Limits(max_frame=1 << 30))
    for end in (ends.host, ends.gateway):
        error = error_of(end.receive((2 << 20).to_bytes(4, "little"), 0.0))
        assert "frame of 2097152 bytes, expected at most 1048576" in str(error)
    welcomed = running()
    assert welcomed.host.receive(((2 << 20) + 4).to_bytes(4, "little"), 0.0) == []


def test_where_not_a_word_has_come_it_may_be_that_one_end_uses_tls() -> None:
    doubt = "nothing has come: expected the other end to be at work, and both to use TLS, or neither"
    assert doubt in str(error_of(Ends().gateway.tick(1e3)))
    assert doubt in str(error_of(Ends().gateway.ended()))
    ends = Ends()
    ends.gateway.may_use_tls = False  # over a socket of this machine
    assert str(error_of(ends.gateway.ended())).endswith("nothing has come: expected the other end to be at work")
    ends = Ends()
    ends.to_gateway(1)
    assert doubt not in str(error_of(ends.gateway.tick(1e3)))


def test_a_host_that_changed_is_not_welcomed_to_its_session() -> None:
    session = running().session
    assert session is not None
    again = greeted(said=hello(autoreset="DISABLED"))
    with pytest.raises(WireError, match=r"hello.autoreset is not what it was"):
        again.gateway.welcome(session)
    again.gateway.refuse("session", "hello.autoreset is not what it was")
    assert error_of(again.to_host()).code == "session"


def test_a_gateway_that_is_not_asked_in_can_not_welcome() -> None:
    gateway = wire.GatewayConnection(software="g", nonce=GATEWAY_NONCE, secret=None, limits=wire.Limits(), now=0.0)
    with pytest.raises(WireError, match="welcome: no host waits for it"):
        gateway.welcome(wire.GatewaySession(TOKEN, hello(), (0, 1), (0, 2)))


def test_either_end_may_say_goodbye_in_the_handshake() -> None:
    ends = greeted()
    ends.host.goodbye("changed my mind")
    ends.gateway.goodbye("full")
    (at_gateway,), (at_host,) = ends.to_gateway(), ends.to_host()
    assert isinstance(at_gateway, wire.Goodbye)
    assert isinstance(at_host, wire.Goodbye)
    assert ends.host.phase is ends.gateway.phase is wire.ConnectionPhase.ENDED


@pytest.mark.parametrize("claim", [b"", (1 << 16).to_bytes(4, "little") + (8).to_bytes(4, "little")])
def test_a_stranger_costs_little_memory_until_the_handshake_is_over(claim: bytes) -> None:
    stranger = Ends()
    stranger.gateway.receive(claim, 0.0)
    assert len(stranger.gateway.buffer()) <= 16 << 10
    assert allocated(stranger.gateway._decoder) <= 20 << 10
    ends = running()
    assert len(ends.gateway.buffer()) == len(ends.host.buffer()) == 64 << 10
