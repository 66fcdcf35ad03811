"""`HttpServer`: policies over HTTP and WebSocket, with JSON or msgpack, and their counts as Prometheus reads them."""

import asyncio
import hmac
import json
import math
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from rollflow.nodes.policies.space_text import described
from rollflow.policy.serving.request import (
    CONTENT_TYPE,
    PROTOCOL,
    Acted,
    ActRequest,
    OwnSession,
    RequestError,
    ServingError,
    UnknownPolicyError,
    item_from,
    pack,
    plain,
    unpack,
)
from rollflow.policy.serving.shelf import Shelf, Watcher
from rollflow.stream.data.closing import ClosedOnExit
from rollflow.stream.data.errors import EnvError, WireError, shown
from rollflow.stream.data.system import require_packages
from rollflow.stream.data.tree import Tree, stack_trees, tree_at
from rollflow.stream.net.endpoint import address_of, close_sockets, endpoint_at, listen_on
from rollflow.stream.wire.address import TcpAddress

try:
    import uvicorn
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, HTTPConnection, Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route, WebSocketRoute
    from starlette.websockets import WebSocket, WebSocketDisconnect
except ImportError:
    require_packages("serving", "serve", "uvicorn", "starlette", "prometheus_client", error=ImportError)
    raise

TIDY_SECONDS = 5.0
_GRACE_SECONDS = 10
_FIELDS = {"observation", "reward", "session", "begins"}
# Fields of many observations, and the field of each.
_COLUMNS = {"rewards": "reward", "sessions": "session", "begins": "begins"}
_BATCH_FIELDS = {"observations", *_COLUMNS}
_MOST_UNDER_WAY = 256  # messages of one connection
_LEFT = 1000  # WebSocket's code of a connection that was closed on purpose


class Conversation:
    """One client's messages over an accepted WebSocket; each is answered once it is acted on.

    A client that has said `hello` has sessions of its own. They are forgotten if it leaves; if its connection
    breaks, they go on by the next one.
    """

    def __init__(self, socket: WebSocket, server: "HttpServer") -> None:
        self._socket, self._server = socket, server
        self._shelf, self._clients = server.shelf, server.clients
        self._client: str | None = None

    async def run(self) -> None:
        """Take messages in their order until the connection is over: text is JSON, bytes are msgpack."""
        room, tasks = asyncio.Semaphore(_MOST_UNDER_WAY), set[asyncio.Task[None]]()
        code = None
        try:
            while (message := await self._socket.receive())["type"] == "websocket.receive":
                await room.acquire()
                task = asyncio.create_task(self._answer(message.get("text"), message.get("bytes")))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                task.add_done_callback(lambda _: room.release())
            code = message.get("code")
        finally:
            for task in tasks:
                task.cancel()
            if self._client is not None and self._clients.get(self._client) is self:
                del self._clients[self._client]
                if code == _LEFT:
                    self._shelf.forget_client(self._client)

    async def _answer(self, text: str | None, data: bytes | None) -> None:
        fields: Any = None
        try:
            fields = unpack(data or b"") if text is None else read_json(text)
            answer = await self._answered(fields)
        except Exception as error:
            answer = refusal_of(error)
        if isinstance(fields, Mapping) and "id" in fields:
            answer["id"] = fields["id"]
        with suppress(WebSocketDisconnect, RuntimeError):  # it has gone
            if text is None:
                await self._socket.send_bytes(pack(answer))
            else:
                await self._socket.send_text(json.dumps(plain(answer)))

    async def _answered(self, fields: Any) -> dict[str, Any]:
        _check_map(fields)
        if self._client is not None and self._clients.get(self._client) is not self:
            raise RequestError("this client has another connection since")
        if "hello" in fields:
            return self._welcome(fields)
        rest = {key: value for key, value in fields.items() if key not in ("id", "policy")}
        name = self._name(fields.get("policy"))
        if "forget" in fields:
            session = rest["forget"]
            owned = session if self._client is None else OwnSession(self._client, session)
            return {"forgotten": self._shelf.forget(name, owned)}
        if "observations" in fields:
            return _batch_fields(await self._server.act_batch(name, rest, self._client))
        return (await self._server.act(name, rest, self._client))._asdict()

    def _welcome(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        if fields["hello"] != PROTOCOL:
            text = f"'hello' is {shown(fields['hello'])}, expected {PROTOCOL}: the protocol's version here"
            raise ServingError(text, 426)
        client = fields.get("client")
        if not isinstance(client, str) or not client:
            raise RequestError(f"'client' is {shown(client)}, expected a text that is this client's alone")
        self._client = client
        self._clients[client] = self
        policies = {name: description_of(self._shelf, name) for name in self._shelf.names}
        return {"hello": PROTOCOL, "max_bytes": self._server.max_body, "policies": policies}

    def _name(self, name: Any) -> str:
        names = self._shelf.names
        if name is None and len(names) == 1:
            return names[0]
        if not isinstance(name, str):
            served = ", ".join(names) or "none"
            raise UnknownPolicyError(f"'policy' is {shown(name)}, expected one of those that are served: {served}")
        return name


def description_of(shelf: Shelf, name: str) -> dict[str, Any]:
    """A served policy in plain values: version, spaces, and whether sessions have a memory."""
    batcher = shelf.batcher(name)
    return {
        "name": name,
        "version": batcher.version,
        "observation_space": described(batcher.policy.observation_space),
        "action_space": described(batcher.policy.action_space),
        "has_memory": batcher.book.has_memory,
    }


def refusal_of(error: BaseException) -> dict[str, Any]:
    """An error as clients get it."""
    text = str(error) if isinstance(error, ServingError) else f"{type(error).__name__}: {error}"
    return {"error": text, "status": getattr(error, "status", 500)}


def read_json(text: bytes | str) -> Any:
    """A message out of JSON. Raises RequestError."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is no JSON: {error}") from None


def _batch_fields(outcomes: Sequence[Acted | BaseException]) -> dict[str, Any]:
    acted = {place: each for place, each in enumerate(outcomes) if isinstance(each, Acted)}
    refused = [
        {"place": place, **refusal_of(each)} for place, each in enumerate(outcomes) if isinstance(each, BaseException)
    ]
    return {
        "actions": stack_trees([each.action for each in acted.values()]) if acted else None,
        "places": list(acted),
        "versions": [each.version for each in acted.values()],
        "weights": [each.weights for each in acted.values()],
        "refused": refused,
    }


def _check_fields(fields: Any, known: set[str], needed: str) -> None:
    _check_map(fields)
    if unknown := [key for key in fields if key not in known]:
        raise RequestError(f"unknown field {unknown[0]!r}, expected {', '.join(sorted(known))}")
    if needed not in fields:
        raise RequestError(f"'{needed}' is missing")


def _check_map(fields: Any) -> None:
    if not isinstance(fields, Mapping):
        raise RequestError(f"the request is {type(fields).__name__}, expected an object with 'observation'")


class HttpServer(ClosedOnExit):
    """Serves a shelf of policies over HTTP and WebSocket, until it is closed.

        shelf         the policies
        listen        `host:port` or `tcp://host:port`; port 0: any that is free
        secret        that clients send as `Authorization: Bearer SECRET`; needed but on loopback
        certificate,  files for TLS; the key may be in the certificate's file
        key
        max_body      bytes of a request, at most

    clients    client's name for itself -> its newest conversation

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
        address, _, self._secret, _ = endpoint_at(f"tcp://{listen.removeprefix('tcp://')}", secret, None, None)
        assert isinstance(address, TcpAddress)
        for file, option in ((certificate, "certificate"), (key, "key")):
            if file is not None and not file.is_file():
                raise WireError(f"there is no file {file}, expected the {option} for TLS", "tls")
        self.shelf, self.max_body = shelf, max_body
        self._loop: asyncio.AbstractEventLoop  # set before the first request
        self.clients: dict[str, Conversation] = {}
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

    # Acting

    async def act(self, name: str, fields: Any, client: str | None = None) -> Acted:
        """The answer to a request for the action of a policy.

            fields    observation    an item of the observation space
                      reward         of the session's action before; may be missing
                      session        a text or a number; missing: an observation by itself
                      begins         true if an episode begins
            client    whose session it is; None: it is the same one for all clients

        Raises ServingError: RequestError, with the field, if one is wrong.
        """
        _check_fields(fields, _FIELDS, "observation")
        space = self.shelf.batcher(name).policy.observation_space
        observation = item_from(space, fields["observation"], "observation")
        return await self._submitted(name, self._request(fields, observation, client))

    async def act_batch(self, name: str, fields: Any, client: str | None = None) -> list[Acted | BaseException]:
        """The answers to `fields`: observations any[N, ...], and lists of N of the other fields, as `act` has them.

        Raises ServingError if a field is wrong, and returns it if only some observations have no action.
        """
        _check_fields(fields, _BATCH_FIELDS, "observations")
        columns = {column: fields[column] for column in _COLUMNS if fields.get(column) is not None}
        if "sessions" not in columns:
            raise RequestError("'sessions' is missing, expected a list with one for each observation, null for none")
        for column, values in columns.items():
            if not isinstance(values, list) or len(values) != len(columns["sessions"]) or not values:
                raise RequestError(f"'{column}' is {shown(values)}, expected a list with one for each of 'sessions'")
        count = len(columns["sessions"])
        space = self.shelf.batcher(name).policy.observation_space
        rows = item_from(space, fields["observations"], "observations", (count,))
        places = [{_COLUMNS[column]: values[row] for column, values in columns.items()} for row in range(count)]
        requests = [self._request(place, tree_at(rows, row), client) for row, place in enumerate(places)]
        answers = [self._submitted(name, request) for request in requests]
        return await asyncio.gather(*answers, return_exceptions=True)

    def deliver(self, outcomes: Sequence[tuple[asyncio.Future[Acted], Acted | Exception]]) -> None:
        """Set the futures; called from another thread."""
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._set, outcomes)

    def _submitted(self, name: str, request: ActRequest) -> asyncio.Future[Acted]:
        """What becomes of a request, which is submitted now."""
        answer: asyncio.Future[Acted] = request.ticket
        try:
            self.shelf.submit(name, request)
        except ServingError as error:
            answer.set_exception(error)
        return answer

    def _request(self, fields: Mapping[str, Any], observation: Tree, client: str | None) -> ActRequest:
        """A request for one observation out of the other fields."""
        session, reward, begins = fields.get("session"), fields.get("reward"), fields.get("begins", False)
        if not isinstance(session, str | int | None) or isinstance(session, bool):
            raise RequestError(f"'session' is {shown(session)}, expected a text or a whole number")
        if reward is not None and (not isinstance(reward, int | float) or not math.isfinite(reward)):
            raise RequestError(f"'reward' is {shown(reward)}, expected a finite number")
        if not isinstance(begins, bool):
            raise RequestError(f"'begins' is {shown(begins)}, expected true or false")
        owned = session if session is None or client is None else OwnSession(client, session)
        reward = math.nan if reward is None else float(reward)
        return ActRequest(owned, observation, reward, begins, self.deliver, self._loop.create_future())

    @staticmethod
    def _set(outcomes: Sequence[tuple[asyncio.Future[Acted], Acted | Exception]]) -> None:
        for answer, outcome in outcomes:
            if answer.done():  # whoever asked has gone
                continue
            if isinstance(outcome, Exception):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)

    # HTTP

    def _application(self) -> Starlette:
        """The application, for an ASGI server."""
        routes: list[Any] = [
            Route("/health", self._health),
            Route("/ready", self._ready),
            Route("/metrics", self._metrics),
            Route("/v1/policies", self._answered(self._policies)),
            Route("/v1/policies/{name}", self._answered(self._policy)),
            Route("/v1/policies/{name}/act", self._answered(self._act), methods=["POST"]),
            WebSocketRoute("/v1/stream", self._stream),
        ]
        return Starlette(routes=routes, lifespan=self._tidying)

    @asynccontextmanager
    async def _tidying(self, _: Starlette) -> AsyncIterator[None]:
        self._loop = asyncio.get_running_loop()
        watcher = Watcher([self.shelf.tidy], TIDY_SECONDS)
        try:
            yield
        finally:
            await asyncio.to_thread(watcher.close)

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
        ready = bool(self.shelf.names)
        return Response("ready\n" if ready else "no policy yet\n", 200 if ready else 503, media_type="text/plain")

    async def _metrics(self, _: Request) -> Response:
        return Response(generate_latest(self.shelf.meters.registry), headers={"content-type": CONTENT_TYPE_LATEST})

    async def _policies(self, _: Request) -> Any:
        return {"policies": [description_of(self.shelf, name) for name in self.shelf.names]}

    async def _policy(self, request: Request) -> Any:
        return description_of(self.shelf, request.path_params["name"])

    async def _act(self, request: Request) -> Any:
        fields = _read(request.headers.get("content-type", ""), await self._body(request))
        return (await self.act(request.path_params["name"], fields))._asdict()

    async def _body(self, request: Request) -> bytes:
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > self.max_body:
                raise ServingError(f"the body is larger than {self.max_body} bytes", 413)
            parts.append(part)
        return b"".join(parts)

    async def _stream(self, socket: WebSocket) -> None:
        try:
            self._prove(socket)
        except ServingError as error:
            await socket.close(1008, str(error))  # which is status 403 here
            return
        await socket.accept()
        await Conversation(socket, self).run()


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
