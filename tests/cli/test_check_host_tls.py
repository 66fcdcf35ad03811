"""`rollflow check-host` over encrypted connections."""

import ssl
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import trustme
from command_errors import Says
from remote_hosts import serving

from rollflow.cli.main import main
from rollflow.nodes import EnvHost


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], ssl.SSLContext]:
    """Arguments that name an authority and a certificate of its own, and a server's context, which asks for one."""
    folder, authority = tmp_path_factory.mktemp("tls"), trustme.CA()
    trusted, own = f"{folder}/authority.pem", f"{folder}/own.pem"
    authority.cert_pem.write_to_path(trusted)
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(own)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=trusted)
    context.load_cert_chain(own)
    context.verify_mode = ssl.CERT_REQUIRED
    return ["--tls", "--tls-ca", trusted, "--tls-cert", own], context


@contextmanager
def listening_host(tls: ssl.SSLContext | None) -> Iterator[str]:
    with EnvHost("CartPole-v1") as host, serving(host, "tcp://127.0.0.1:0", tls=tls) as address:
        yield address


def test_a_host_is_checked_over_tls(tls: tuple[list[str], ssl.SSLContext], shown: Says) -> None:
    arguments, context = tls
    with listening_host(context) as address:
        assert shown("check-host", address, *arguments).endswith("all is well\n")


def test_a_host_that_listens_and_does_not_agree_is_told_so(
    tls: tuple[list[str], ssl.SSLContext], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, context = tls
    for at_host, words, told in (
        (None, arguments, "it speaks no TLS, expected it to\n"),
        (context, arguments[:3], "it did not agree on TLS: the other end refuses: certificate required\n"),
    ):
        with listening_host(at_host) as address:
            assert main(["check-host", address, *words]) == 1
        assert told in capsys.readouterr().out
