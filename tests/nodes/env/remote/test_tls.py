"""Encrypted connections that don't come about: both ends say why."""

import ssl
from typing import Any, NamedTuple

import pytest
from remote_hosts import serving
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
    while not gateway._loop.refusals and not gateway._loop.dialler.problems:
        gateway.wait(None)
        gateway.service()
    return gateway.waited_for().replace("\\", "")


def told(
    dials: str, host_tls: ssl.SSLContext | None, gateway_tls: ssl.SSLContext | None, caplog: pytest.LogCaptureFixture
) -> tuple[str, str]:
    """Return the host's error for a connection that fails, and what the gateway says; one of both dials."""
    if dials == "host":
        envs = RemoteEnvs.listen("tcp://127.0.0.1:0", tls=gateway_tls)
        gateway = Gateway(envs, "env")
        with EnvHost(makers(0)) as host, pytest.raises(WireError) as raised:
            host.connect(str(envs.addresses[0]), tls=host_tls)
        assert raised.value.code == "tls"
        at_host, at_gateway = str(raised.value), refused(gateway)
    else:
        with EnvHost(makers(0)) as host, serving(host, "tcp://127.0.0.1:0", tls=host_tls) as address:
            gateway = Gateway(RemoteEnvs.connect(address, tls=gateway_tls), "env")
            at_gateway = refused(gateway)
            while not (logged := [each for each in caplog.records if each.name == "rollflow.nodes.env.remote.host"]):
                gateway.wait(None)
        at_host = logged[0].getMessage().replace("\\", "")
    gateway.close()
    return at_host, at_gateway


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.dials}, {case.listens}")
def test_both_ends_say_what_is_wrong_with_a_certificate(
    case: Case, certificates: dict[str, ssl.SSLContext], caplog: pytest.LogCaptureFixture
) -> None:
    dials, listens = certificates[case.dials], certificates[case.listens]
    at_host, at_gateway = told("host", dials, listens, caplog)
    assert at_host == f"gateway: {case.dials_told}"
    assert f"host: {case.listens_told}" in at_gateway
    at_host, at_gateway = told("gateway", listens, dials, caplog)
    assert f"gateway: {case.listens_told}" in at_host
    assert f"host: {case.dials_told}" in at_gateway


@pytest.mark.parametrize(
    ("dials", "tls", "says"),
    [
        pytest.param("host", (None, "server"), "refuses: the gateway speaks TLS and the host", marks=pytest.mark.slow),
        pytest.param("host", ("client", None), "the host speaks TLS and the gateway", marks=pytest.mark.slow),
        ("gateway", (None, "client"), "the gateway speaks TLS and the host"),
    ],
)
def test_both_ends_say_that_only_one_of_them_speaks_tls(
    dials: str, tls: Any, says: str, certificates: dict[str, ssl.SSLContext], caplog: pytest.LogCaptureFixture
) -> None:
    at_host, at_gateway = told(dials, *map(certificates.get, tls), caplog)
    assert f"gateway: {says} does not, expected both to, or neither" in at_host
    assert f"host: {says.removeprefix('refuses: ')} does not, expected both to, or neither" in at_gateway


def test_a_name_to_check_where_there_is_none_is_refused_at_once() -> None:
    context = ssl.create_default_context()
    told = "unix:/nowhere has no host name to check in a certificate; expected tls.check_hostname=False"
    with pytest.raises(WireError, match=told):
        RemoteEnvs.connect("unix:/nowhere", tls=context)
    with EnvHost("CartPole-v1") as host, pytest.raises(WireError, match=told):
        host.connect("unix:/nowhere", tls=context)
