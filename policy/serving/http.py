"""The way in over HTTP and WebSocket: an ASGI application, with JSON or msgpack."""

import asyncio
import hmac
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from rollflow.policy.serving import openpi
from rollflow.policy.serving.api_page import api_of, description_of
from rollflow.policy.serving.exposition import CONTENT_TYPE as METRICS_TYPE, exposition
from rollflow.policy.serving.items import item_from, plain
from rollflow.policy.serving.packed_arrays import CONTENT_TYPE, pack, unpack
from rollflow.policy.serving.request import (
    Acted,
    ActRequest,
    ClosedError,
    Outcome,
    RequestError,
    ServingError,
)
from rollflow.policy.serving.shelf import Shelf
from rollflow.stream.data.errors import shown
from rollflow.stream.data.tree import Tree

TIDY_SECONDS = 5.0
_SCHEMES = b"Bearer ", b"Api-Key "  # the second one as openpi's clients have it
_FIELDS = {"observation", "reward", "session", "begins", "number", "version"}


class TooLargeError(ServingError):
    """Raised when a request's body is larger than a server takes."""

    status = 413


class UnprovedError(ServingError):
    """Raised when a request does not show the server's secret."""

    status = 401


class AsyncFront:
    """Takes answers from the threads that act into an event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def deliver(self, outcomes: Sequence[tuple[asyncio.Future[Acted], Outcome]]) -> None:
        """Set the futures; called from another thread."""
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._set, outcomes)

    async def act(self, shelf: Shelf, name: str, fields: Any) -> Acted:
        """The answer to the fields of a request: see `request_of`."""
        answer: asyncio.Future[Acted] = self._loop.create_future()
        request = request_of(shelf, name, fields, self, answer)
        shelf.submit(name, request, fields.get("version"))
        return await answer

    @staticmethod
    def _set(outcomes: Sequence[tuple[asyncio.Future[Acted], Outcome]]) -> None:
        for answer, outcome in outcomes:
            if answer.done():  # whoever asked has gone
                continue
            if isinstance(outcome, Exception):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)


def request_of(shelf: Shelf, name: str, fields: Any, front: Any, ticket: Any) -> ActRequest:
    """A request out of the fields that a client sent.

        observation    an item of the observation space
        reward         of the session's action before; may be missing
        session        a text or a number; missing: an observation by itself
        begins         true where an episode begins
        number         of the request in its session, from 0 on; may be missing
        version        of the policy, a text; missing: the session's own, or the newest

    Raises RequestError, with the field; UnknownPolicyError.
    """
    if not isinstance(fields, Mapping):
        raise RequestError(f"the request is {type(fields).__name__}, expected an object with 'observation'")
    if unknown := [key for key in fields if key not in _FIELDS]:
        raise RequestError(f"unknown field {unknown[0]!r}, expected {', '.join(sorted(_FIELDS))}")
    if "observation" not in fields:
        raise RequestError("'observation' is missing")
    session, reward, number = fields.get("session"), fields.get("reward"), fields.get("number")
    begins = fields.get("begins", False)
    if not isinstance(session, str | int | None) or isinstance(session, bool):
        raise RequestError(f"'session' is {shown(session)}, expected a text or a whole number")
    if reward is not None and (not isinstance(reward, int | float) or not math.isfinite(reward)):
        raise RequestError(f"'reward' is {shown(reward)}, expected a finite number")
    if not isinstance(begins, bool):
        raise RequestError(f"'begins' is {shown(begins)}, expected true or false")
    if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 0):
        raise RequestError(f"'number' is {shown(number)}, expected a whole number from 0 on")
    if not isinstance(fields.get("version"), str | None):
        raise RequestError(f"'version' is {fields['version']!r}, expected a text")
    policy = shelf.newest(name).policy
    observation: Tree = item_from(policy.observation_space, fields["observation"], "observation")
    return ActRequest(
        session, observation, math.nan if reward is None else float(reward), begins, number, front, ticket
    )


class HttpFront:
    """Builds the ASGI application that serves a shelf of policies.

    shelf       the policies
    secret      that clients send as `Authorization: Bearer SECRET`; None: anybody is answered
    max_body    bytes of a request, at most
    openpi_for  name of the policy that speaks openpi's protocol at `/`; None: none does
    """

    def __init__(
        self, shelf: Shelf, *, secret: bytes | None = None, max_body: int = 1 << 24, openpi_for: str | None = None
    ) -> None:
        self._shelf, self._secret, self._max_body, self._openpi_for = shelf, secret, max_body, openpi_for
        self._front: AsyncFront | None = None

    def application(self) -> Starlette:
        """The application, for an ASGI server."""
        routes: list[Any] = [
            Route("/health", self._health),
            Route("/ready", self._ready),
            Route("/metrics", self._metrics),
            Route("/openapi.json", self._answered(self._openapi)),
            Route("/v1/policies", self._answered(self._policies)),
            Route("/v1/policies/{name}", self._answered(self._policy)),
            Route("/v1/policies/{name}/act", self._answered(self._act), methods=["POST"]),
            Route("/v1/policies/{name}/sessions/{session}", self._answered(self._forget), methods=["DELETE"]),
            WebSocketRoute("/v1/policies/{name}/stream", self._stream),
        ]
        if self._openpi_for is not None:
            routes += [WebSocketRoute("/", self._openpi), Route("/healthz", self._health)]
        return Starlette(routes=routes, lifespan=self._tidying)

    @asynccontextmanager
    async def _tidying(self, _: Starlette) -> AsyncIterator[None]:
        self._front = AsyncFront()

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
                return _response(request, {"error": _text_of(error)}, getattr(error, "status", 500))

        return answer

    def _prove(self, connection: HTTPConnection) -> None:
        if self._secret is None:
            return
        shown = connection.headers.get("authorization", "").encode()
        if not any(hmac.compare_digest(shown, scheme + self._secret) for scheme in _SCHEMES):
            raise UnprovedError("expected the header 'Authorization: Bearer SECRET' with this server's secret")

    async def _health(self, _: Request) -> Response:
        return Response("ok\n", media_type="text/plain")

    async def _ready(self, _: Request) -> Response:
        ready = bool(self._shelf.names)
        return Response("ready\n" if ready else "no policy yet\n", 200 if ready else 503, media_type="text/plain")

    async def _metrics(self, _: Request) -> Response:
        return Response(exposition(self._shelf), headers={"content-type": METRICS_TYPE})

    async def _openapi(self, _: Request) -> Any:
        return api_of(self._shelf)

    async def _policies(self, _: Request) -> Any:
        return {"policies": [description_of(self._shelf, name) for name in self._shelf.names]}

    async def _policy(self, request: Request) -> Any:
        return description_of(self._shelf, request.path_params["name"])

    async def _act(self, request: Request) -> Any:
        fields = _read(request.headers.get("content-type", ""), await self._body(request))
        return _shown(await self._running_front.act(self._shelf, request.path_params["name"], fields))

    async def _forget(self, request: Request) -> Any:
        session: Hashable = request.path_params["session"]
        return {"forgotten": self._shelf.forget(request.path_params["name"], session)}

    async def _body(self, request: Request) -> bytes:
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > self._max_body:
                raise TooLargeError(f"the body is larger than {self._max_body} bytes")
            parts.append(part)
        return b"".join(parts)

    async def _stream(self, socket: WebSocket) -> None:
        """Answer one message after the other: text is JSON, bytes are msgpack."""
        if not await self._accepted(socket):
            return
        name = socket.path_params["name"]
        with suppress(WebSocketDisconnect):
            while True:
                message = await socket.receive()
                if message["type"] != "websocket.receive":
                    return
                text, data = message.get("text"), message.get("bytes")
                try:
                    fields = unpack(data or b"") if text is None else _read("application/json", text.encode())
                    answer = _shown(await self._running_front.act(self._shelf, name, fields))
                except Exception as error:
                    answer = {"error": _text_of(error), "status": getattr(error, "status", 500)}
                if text is None:
                    await socket.send_bytes(pack(answer))
                else:
                    await socket.send_text(json.dumps({key: plain(value) for key, value in answer.items()}))

    async def _openpi(self, socket: WebSocket) -> None:
        if await self._accepted(socket):
            assert self._openpi_for is not None
            await openpi.converse(socket, self._shelf, self._openpi_for, self._running_front)

    async def _accepted(self, socket: WebSocket) -> bool:
        try:
            self._prove(socket)
        except UnprovedError as error:
            await socket.close(1008, str(error))
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
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is no JSON: {error}") from None


def _shown(acted: Acted) -> dict[str, Any]:
    return {"action": acted.action, "version": acted.version, "weights": acted.weights, "number": acted.number}


def _response(request: Request, answer: Any, status: int) -> Response:
    if CONTENT_TYPE in request.headers.get("accept", ""):
        return Response(pack(answer), status, media_type=CONTENT_TYPE)
    return JSONResponse(plain(answer), status)


def _text_of(error: Exception) -> str:
    own = isinstance(error, ServingError)
    return str(error) if own else f"{type(error).__name__}: {error}"
