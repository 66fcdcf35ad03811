"""Encrypted connections that don't come about: both ends say why."""

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest
from remote_rollouts import makers

from rollflow import RemoteEnvs
from rollflow.nodes import EnvHost
from rollflow.nodes.env.remote.gateway import Gateway
from rollflow.stream.data.errors import WireError


class Case(NamedTuple):
    """Contexts of whoever dials and whoever listens, and what each says of it."""

    dials: str
    listens: str
    dials_told: str
    listens_told: str


CASES = [
    Case(
        "without",
        "server",
        "TLS: the other end refuses: certificate required",
        "TLS: the other end shows no certificate, expected one",
    ),
    Case(
        "client",
        "other server",
        "TLS: the other end's certificate is not good: unable to get local issuer certificate",
        "TLS: the other end refuses: unknown ca",
    ),
]


def refused(gateway: Gateway) -> str:
    """Look after a gateway until it has turned somebody away: what it says of it."""
    while not gateway.refusals and not gateway._loop.dialler.problems:
        gateway.wait(None)
        gateway.service()
    return gateway.waited_for().replace("\\", "")


@contextmanager
def serving(host: EnvHost) -> Iterator[None]:
    """A host that listens serves, in a thread."""
    thread = threading.Thread(target=host.serve)
    thread.start()
    try:
        yield
    finally:
        host.stop()
        thread.join()


def told_where_the_host_dials(host_tls: ssl.SSLContext | None, gateway_tls: ssl.SSLContext | None) -> tuple[str, str]:
    """Return the host's error for a connection that fails, and what the gateway does."""
    envs = RemoteEnvs.listen("tcp://127.0.0.1:0", tls=gateway_tls)
    gateway = Gateway(envs, "env")
    with EnvHost(makers(0)) as host, pytest.raises(WireError) as raised:
        host.connect(str(envs.addresses[0]), tls=host_tls)
    assert raised.value.code == "tls"
    told = refused(gateway)
    gateway.close()
    return str(raised.value), told


def told_where_the_gateway_dials(
    host_tls: ssl.SSLContext | None,
    gateway_tls: ssl.SSLContext | None,
    caplog: pytest.LogCaptureFixture,
) -> tuple[str, str]:
    """Return the host's error for a connection that fails, and what the gateway does."""
    with (
        EnvHost(makers(0)) as host,
        host.listening("tcp://127.0.0.1:0", tls=host_tls) as address,
        serving(host),
    ):
        gateway = Gateway(RemoteEnvs.connect(str(address), tls=gateway_tls), "env")
        told = refused(gateway)
        while not (at_host := [each for each in caplog.records if each.name == "rollflow.nodes.env.remote.host"]):
            gateway.wait(None)
        gateway.close()
    return at_host[0].getMessage().replace("\\", ""), told


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.dials}, {case.listens}")
def test_both_ends_say_what_is_wrong_with_a_certificate(
    case: Case, certificates: dict[str, ssl.SSLContext], caplog: pytest.LogCaptureFixture
) -> None:
    dials, listens = certificates[case.dials], certificates[case.listens]
    at_host, at_gateway = told_where_the_host_dials(dials, listens)
    assert at_host == f"gateway: {case.dials_told}"
    assert f"host: {case.listens_told}" in at_gateway
    at_host, at_gateway = told_where_the_gateway_dials(listens, dials, caplog)
    assert f"gateway: {case.listens_told}" in at_host
    assert f"host: {case.dials_told}" in at_gateway


@pytest.mark.slow
def test_both_ends_say_that_only_one_of_them_speaks_tls_where_the_host_dials(
    certificates: dict[str, ssl.SSLContext],
) -> None:
    at_host, at_gateway = told_where_the_host_dials(None, certificates["server"])
    expected = "the gateway speaks TLS and the host does not, expected both to, or neither"
    assert at_host == f"gateway: refuses: {expected}"
    assert f"host: {expected}" in at_gateway
    at_host, at_gateway = told_where_the_host_dials(certificates["client"], None)
    expected = "the host speaks TLS and the gateway does not, expected both to, or neither"
    assert at_host == f"gateway: {expected}"
    assert f"host: {expected}" in at_gateway


def test_both_ends_say_that_only_the_gateway_speaks_tls_where_it_dials(
    certificates: dict[str, ssl.SSLContext], caplog: pytest.LogCaptureFixture
) -> None:
    at_host, at_gateway = told_where_the_gateway_dials(None, certificates["client"], caplog)
    expected = "the gateway speaks TLS and the host does not, expected both to, or neither"
    assert f"gateway: {expected}" in at_host
    assert f"host: {expected}" in at_gateway


def test_a_name_to_check_where_there_is_none_is_refused_at_once() -> None:
    context = ssl.create_default_context()
    told = "unix:/nowhere has no host name to check in a certificate; expected tls.check_hostname=False"
    with pytest.raises(WireError, match=told):
        RemoteEnvs.connect("unix:/nowhere", tls=context)
    with EnvHost("CartPole-v1") as host, pytest.raises(WireError, match=told):
        host.connect("unix:/nowhere", tls=context)
