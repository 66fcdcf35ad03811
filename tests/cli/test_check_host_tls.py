"""`rollflow check-host` over encrypted connections, in both directions."""

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import pytest
import trustme
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
    with EnvHost("CartPole-v1", tls=tls) as host, serving(host, "tcp://127.0.0.1:0") as address:
        yield address


@contextmanager
def dialling_host(address: str, tls: ssl.SSLContext | None) -> Iterator[None]:
    """A host that dials again and again, for it is refused many a time."""
    ended = threading.Event()
    with EnvHost("CartPole-v1", tls=tls) as host:

        def dial() -> None:
            while not ended.is_set():
                try:
                    host.connect(address, retry_s=0.0)
                except Exception:
                    continue

        thread = threading.Thread(target=dial)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            host.stop()
            thread.join()


def unused_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@pytest.mark.slow
@pytest.mark.parametrize("side", ["listens", "dials"])
def test_a_host_is_checked_over_tls(side: str, files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    with ExitStack() as stack:
        if side == "listens":
            words = [stack.enter_context(listening_host(context_of(files, ssl.Purpose.CLIENT_AUTH)))]
        else:
            words = ["--listen", unused_address()]
            stack.enter_context(dialling_host(words[1], context_of(files, ssl.Purpose.SERVER_AUTH)))
        assert main(["check-host", *words, *files.arguments]) == 0
    assert capsys.readouterr().out.endswith("all is well\n")


def test_a_host_that_listens_and_does_not_agree_is_told_so(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    with listening_host(None) as address:
        assert main(["check-host", address, *files.arguments]) == 1
    assert "it speaks no TLS, expected it to\n" in capsys.readouterr().out
    with listening_host(context_of(files, ssl.Purpose.CLIENT_AUTH)) as address:
        assert main(["check-host", address, "--tls", "--tls-ca", files.authority]) == 1
    assert "it did not agree on TLS: the other end refuses: certificate required\n" in capsys.readouterr().out


def test_a_host_that_dials_and_does_not_agree_is_told_so(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    address = unused_address()
    with dialling_host(address, context_of(files, ssl.Purpose.SERVER_AUTH)):
        assert main(["check-host", "--listen", address]) == 1
    assert "it speaks TLS, expected it not to\n" in capsys.readouterr().out
    with dialling_host(address, ssl.create_default_context(cafile=files.authority)):
        assert main(["check-host", "--listen", address, *files.arguments]) == 1
    told = "it did not agree on TLS: the other end shows no certificate, expected one\n"
    assert told in capsys.readouterr().out
