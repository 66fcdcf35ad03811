"""`rollflow check-host` over encrypted connections."""

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import trustme
from command_errors import Says
from remote_hosts import serving

from rollflow.cli.main import main
from rollflow.nodes import EnvHost


class Files(NamedTuple):
    """An authority's certificate, and one that it has issued, with its key."""

    authority: str
    certificate: str

    @property
    def arguments(self) -> list[str]:
        return ["--tls", "--tls-ca", self.authority, "--tls-cert", self.certificate]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(f"{folder}/authority.pem")
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(f"{folder}/own.pem")
    return Files(f"{folder}/authority.pem", f"{folder}/own.pem")


def context_of(files: Files, purpose: ssl.Purpose) -> ssl.SSLContext:
    """A context that asks for the other end's certificate."""
    context = ssl.create_default_context(purpose, cafile=files.authority)
    context.load_cert_chain(files.certificate)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


@contextmanager
def listening_host(tls: ssl.SSLContext | None) -> Iterator[str]:
    with EnvHost("CartPole-v1") as host, serving(host, "tcp://127.0.0.1:0", tls=tls) as address:
        yield address


def test_a_host_is_checked_over_tls(files: Files, shown: Says) -> None:
    with listening_host(context_of(files, ssl.Purpose.CLIENT_AUTH)) as address:
        assert shown("check-host", address, *files.arguments).endswith("all is well\n")


def test_a_host_that_listens_and_does_not_agree_is_told_so(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    with listening_host(None) as address:
        assert main(["check-host", address, *files.arguments]) == 1
    assert "it speaks no TLS, expected it to\n" in capsys.readouterr().out
    with listening_host(context_of(files, ssl.Purpose.CLIENT_AUTH)) as address:
        assert main(["check-host", address, "--tls", "--tls-ca", files.authority]) == 1
    assert "it did not agree on TLS: the other end refuses: certificate required\n" in capsys.readouterr().out
