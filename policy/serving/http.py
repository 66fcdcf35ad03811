"""`HttpServer`: policies over HTTP and WebSocket, with JSON or msgpack, and their counts as Prometheus reads them."""

import asyncio
import hmac
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from rollflow.nodes.env.remote.remote_envs import address_of, close_sockets, listen_on
from rollflow.policy.serving.front import (
    AsyncFront,
    Conversation,
    acted_fields,
    description_of,
    read_json,
    refusal_of,
)
from rollflow.policy.serving.items import CONTENT_TYPE, pack, plain, unpack
from rollflow.policy.serving.request import ClosedError, RequestError, ServingError
from rollflow.policy.serving.shelf import Shelf
from rollflow.stream.data.errors import EnvError, WireError
from rollflow.stream.wire.address import TcpAddress, check_secret, parse_address

TIDY_SECONDS = 5.0
_GRACE_SECONDS = 10


class HttpServer:
    """Serves a shelf of policies over HTTP and WebSocket, until it is closed.

        shelf         the policies
        listen        `host:port` or `tcp://host:port`; port 0: any that is free
        secret        that clients send as `Authorization: Bearer SECRET`; needed but on loopback
        certificate,  files for TLS; the key may be in the certificate's file
        key
        max_body      bytes of a request, at most

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
    ) -> None:
        if not re.fullmatch(r"(tcp://)?[^/]+:\d+", listen):
            raise WireError(f"address {listen!r}, expected 'host:port' for HTTP", "address")
        address = parse_address(listen if "://" in listen else f"tcp://{listen}")
        assert isinstance(address, TcpAddress)
        for file, option in ((certificate, "certificate"), (key, "key")):
            if file is not None and not file.is_file():
                raise WireError(f"there is no file {file}, expected the {option} for TLS", "tls")
        self._shelf, self._max_body = shelf, max_body
        self._secret = None if secret is None else secret.encode()
        check_secret(address, self._secret)
        self._front: AsyncFront | None = None
        self._clients: dict[str, Conversation] = {}
        self._scheme = "https" if certificate else "http"
        config = uvicorn.Config(
            self._application(),
            ssl_certfile=certificate,
            ssl_keyfile=key,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=_GRACE_SECONDS,
            ws_max_size=max_body,
        )
        try:
            config.load()
            self._sockets = listen_on(address)
        except EnvError as error:
            raise WireError(str(error), "address") from error
        except OSError as error:  # of TLS
            raise WireError(f"can't listen on {address}: {error}", "address") from error
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, args=(self._sockets,), name="rollflow serves HTTP", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """Where clients find it, such as `http://127.0.0.1:8080`."""
        address = address_of(self._sockets[0])
        return str(address).replace("tcp", self._scheme, 1)

    def close(self) -> None:
        """Answer what is under way, and listen no more."""
        self._server.should_exit = True
        self._thread.join()
        close_sockets(self._sockets)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _application(self) -> Starlette:
        """The application, for an ASGI server."""
        routes: list[Any] = [
            Route("/health", self._health),
            Route("/ready", self._ready),
            Route("/metrics", self._metrics),
            Route("/v1/policies", self._answered(self._policies)),
            Route("/v1/policies/{name}", self._answered(self._policy)),
            Route("/v1/policies/{name}/act", self._answered(self._act), methods=["POST"]),
            Route("/v1/policies/{name}/sessions/{session}", self._answered(self._forget), methods=["DELETE"]),
            WebSocketRoute("/v1/policies/{name}/stream", self._stream),
            WebSocketRoute("/v1/stream", self._stream),
        ]
        return Starlette(routes=routes, lifespan=self._tidying)

    @asynccontextmanager
    async def _tidying(self, _: Starlette) -> AsyncIterator[None]:
        self._front = AsyncFront(self._shelf)

        async def tidy() -> None:
            while True:
                await asyncio.sleep(TIDY_SECONDS)
                await asyncio.to_thread(self._shelf.tidy)

        task = asyncio.create_task(tidy())
        try:
            yield
        finally:
            task.cancel()

    def _answered(self, handle: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
        """Wrap a handler: its result is sent in the client's format, and its errors with their status."""

        async def answer(request: Request) -> Response:
            try:
                self._prove(request)
                return _response(request, await handle(request), 200)
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception as error:
                refusal = refusal_of(error)
                return _response(request, {"error": refusal["error"]}, refusal["status"])

        return answer

    def _prove(self, connection: HTTPConnection) -> None:
        if self._secret is None:
            return
        shown = connection.headers.get("authorization", "").encode("latin-1")  # the bytes as they came
        if not hmac.compare_digest(shown, b"Bearer " + self._secret):
            raise ServingError("expected the header 'Authorization: Bearer SECRET' with this server's secret", 401)

    async def _health(self, _: Request) -> Response:
        return Response("ok\n", media_type="text/plain")

    async def _ready(self, _: Request) -> Response:
        ready = bool(self._shelf.names)
        return Response("ready\n" if ready else "no policy yet\n", 200 if ready else 503, media_type="text/plain")

    async def _metrics(self, _: Request) -> Response:
        return Response(generate_latest(self._shelf.meters.registry), headers={"content-type": CONTENT_TYPE_LATEST})

    async def _policies(self, _: Request) -> Any:
        return {"policies": [description_of(self._shelf, name) for name in self._shelf.names]}

    async def _policy(self, request: Request) -> Any:
        return description_of(self._shelf, request.path_params["name"])

    async def _act(self, request: Request) -> Any:
        fields = _read(request.headers.get("content-type", ""), await self._body(request))
        return acted_fields(await self._running_front.act(request.path_params["name"], fields))

    async def _forget(self, request: Request) -> Any:
        session: Hashable = request.path_params["session"]
        return {"forgotten": self._shelf.forget(request.path_params["name"], session)}

    async def _body(self, request: Request) -> bytes:
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > self._max_body:
                raise ServingError(f"the body is larger than {self._max_body} bytes", 413)
            parts.append(part)
        return b"".join(parts)

    async def _stream(self, socket: WebSocket) -> None:
        if await self._accepted(socket):
            name, front = socket.path_params.get("name"), self._running_front
            await Conversation(socket, self._shelf, front, self._clients, policy=name, limit=self._max_body).run()

    async def _accepted(self, socket: WebSocket) -> bool:
        try:
            self._prove(socket)
        except ServingError as error:
            await socket.close(1008, str(error))  # which is status 403 here
            return False
        await socket.accept()
        return True

    @property
    def _running_front(self) -> AsyncFront:
        if self._front is None:
            raise ClosedError("the server has not begun")
        return self._front


def _read(content_type: str, body: bytes) -> Any:
    kind = content_type.partition(";")[0].strip()
    if kind == CONTENT_TYPE:
        return unpack(body)
    if kind not in ("application/json", ""):
        raise RequestError(f"content-type is '{kind}', expected 'application/json' or '{CONTENT_TYPE}'")
    return read_json(body)


def _response(request: Request, answer: Any, status: int) -> Response:
    if CONTENT_TYPE in request.headers.get("accept", ""):
        return Response(pack(answer), status, media_type=CONTENT_TYPE)
    return JSONResponse(plain(answer), status)
