"""Addresses on which a gateway or a host listens."""

import ipaddress
from typing import Any

import pytest
from hypothesis import given, strategies as st

from rollflow.stream.data.errors import WireError
from rollflow.stream.wire import TcpAddress, UnixAddress, check_secret, parse_address


@given(st.ip_addresses().map(str) | st.from_regex(r"[a-z0-9][a-z0-9.-]{0,20}", fullmatch=True), st.integers(0, 0xFFFF))
def test_an_address_reads_as_it_is_written(host: str, port: int) -> None:
    assert parse_address(str(TcpAddress(host, port))) == TcpAddress(host, port)


@given(st.text(max_size=40) | st.text(max_size=30).map("tcp://".__add__) | st.text(max_size=30).map("unix:".__add__))
def test_any_text_is_an_address_or_refused(text: str) -> None:
    try:
        address = parse_address(text)
    except WireError as error:
        assert error.code == "address"
    else:
        assert parse_address(str(address)) == address


@given(st.ip_addresses())
def test_loopback_alone_is_local(number: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    mapped = getattr(number, "ipv4_mapped", None)
    assert TcpAddress(str(number), 1).is_local == (mapped or number).is_loopback


@pytest.mark.parametrize(
    ("text", "address", "is_local"),
    [
        ("tcp://learner:7010", TcpAddress("learner", 7010), False),
        ("tcp://0.0.0.0:7010", TcpAddress("0.0.0.0", 7010), False),
        ("tcp://127.0.0.1:0", TcpAddress("127.0.0.1", 0), True),
        ("tcp://127.9.9.9:1", TcpAddress("127.9.9.9", 1), True),
        ("tcp://localhost:1", TcpAddress("localhost", 1), True),
        ("tcp://[::1]:7010", TcpAddress("::1", 7010), True),
        ("tcp://[::ffff:127.0.0.1]:1", TcpAddress("::ffff:127.0.0.1", 1), True),
        ("tcp://[::]:7010", TcpAddress("::", 7010), False),
        ("tcp://[fe80::1%eth0]:1", TcpAddress("fe80::1%eth0", 1), False),
        ("unix:/run/rollflow.sock", UnixAddress("/run/rollflow.sock"), True),
    ],
)
def test_addresses_and_whether_they_are_local(text: str, address: TcpAddress | UnixAddress, is_local: bool) -> None:
    assert parse_address(text) == address
    assert address.is_local is is_local
    assert str(address) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("learner:7010", "'tcp://host:port'"),
        ("tcp://learner", "'tcp://host:port'"),
        ("tcp://learner:70100", "a port from 0 to 65535"),
        ("tcp://learner:-1", "'tcp://host:port'"),
        ("tcp://learner:7010/", "'tcp://host:port'"),
        ("tcp://:7010", "'tcp://host:port'"),
        ("tcp://::1:7010", "'tcp://host:port'"),
        ("tcp://[::x]:7010", "an IPv6 address in brackets"),
        ("tcp://a b:7010", "'tcp://host:port'"),
        ("tcp://learner:\uff17", "'tcp://host:port'"),
        ("tcp://learner:7\n", "'tcp://host:port'"),
        ("http://learner:7010", "'tcp://host:port'"),
        ("unix:run.sock", "an absolute path of at most 103 bytes"),
        ("unix:/" + "x" * 103, "an absolute path of at most 103 bytes"),
        ("unix:/a\0b", "an absolute path"),
        ("", "'tcp://host:port'"),
        (None, "a string: 'tcp://host:port'"),
        (b"unix:/a", "a string: 'tcp://host:port'"),
    ],
)
def test_what_is_no_address_is_refused_with_what_was_expected(text: Any, expected: str) -> None:
    with pytest.raises(WireError, match=expected) as caught:
        parse_address(text)
    assert repr(text) in str(caught.value)


def test_without_a_secret_only_this_machine_may_come_in() -> None:
    check_secret(parse_address("tcp://127.0.0.1:7010"), None)
    check_secret(parse_address("unix:/run/rollflow.sock"), None)
    check_secret(parse_address("tcp://0.0.0.0:7010"), b"key")
    with pytest.raises(WireError, match=r"address 'tcp://0.0.0.0:7010' without a secret, expected one, or a loopback"):
        check_secret(parse_address("tcp://0.0.0.0:7010"), None)
    with pytest.raises(WireError, match="the secret is empty"):
        check_secret(parse_address("tcp://127.0.0.1:7010"), b"")
