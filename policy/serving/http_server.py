"""The HTTP server: uvicorn with the application of `HttpFront`, in a thread of its own."""

import re
import threading
from pathlib import Path
from typing import Self

import uvicorn

from rollflow.policy.serving.http import HttpFront
from rollflow.policy.serving.shelf import Shelf
from rollflow.stream.data.errors import WireError
from rollflow.stream.wire.address import TcpAddress, check_secret, parse_address

_GRACE_SECONDS = 10


class HttpServer:
    """Serves a shelf of policies over HTTP and WebSocket, until it is closed.

        shelf         the policies
        listen        `host:port` or `tcp://host:port`; port 0: any that is free
        secret        that clients send as `Authorization: Bearer SECRET`; needed but on loopback
        certificate,  files for TLS; the key may be in the certificate's file
        key
        max_body      bytes of a request, at most
        openpi_for    name of the policy that speaks openpi's protocol at `/`; None: none does

    Raises WireError for an address that can't be listened on.
    """

    def __init__(
        self,
        shelf: Shelf,
        listen: str,
        *,
        secret: str | None = None,
        certificate: Path | None = None,
        key: Path | None = None,
        max_body: int = 1 << 24,
        openpi_for: str | None = None,
    ) -> None:
        if not re.fullmatch(r"(tcp://)?[^/]+:\d+", listen):
            raise WireError(f"address {listen!r}, expected 'host:port' for HTTP", "address")
        address = parse_address(listen if "://" in listen else f"tcp://{listen}")
        assert isinstance(address, TcpAddress)
        for file, option in ((certificate, "certificate"), (key, "key")):
            if file is not None and not file.is_file():
                raise WireError(f"there is no file {file}, expected the {option} for TLS", "tls")
        check_secret(address, None if secret is None else secret.encode())
        self._host, self._scheme = address.host, "https" if certificate else "http"
        front = HttpFront(
            shelf, secret=None if secret is None else secret.encode(), max_body=max_body, openpi_for=openpi_for
        )
        self._server = uvicorn.Server(
            uvicorn.Config(
                front.application(),
                host=address.host,
                port=address.port,
                ssl_certfile=certificate,
                ssl_keyfile=key,
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=_GRACE_SECONDS,
                ws_max_size=max_body,
            )
        )
        self._failure: BaseException | None = None
        self._began = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rollflow serves HTTP", daemon=True)
        self._thread.start()
        self._began.wait()
        if self._failure is not None:
            self._thread.join()
            raise WireError(f"can't listen on {address}: {self._failure}", "address")

    @property
    def url(self) -> str:
        """Where clients find it, such as `http://127.0.0.1:8080`."""
        port = self._server.servers[0].sockets[0].getsockname()[1]
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{self._scheme}://{host}:{port}"

    def close(self) -> None:
        """Answer what is under way, and listen no more."""
        self._server.should_exit = True
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        begin = self._server.startup

        async def startup(sockets: object = None) -> None:
            await begin()
            self._began.set()

        self._server.startup = startup  # type: ignore[method-assign]  # uvicorn says nowhere else when it listens
        try:
            self._server.run()
        except BaseException as error:  # uvicorn ends with SystemExit where it can't listen
            self._failure = error.__context__ or error
        finally:
            self._began.set()
