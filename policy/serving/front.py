"""Fronts for an event loop: the fields that clients send become requests, and what comes of them an answer.

Over a WebSocket, `Conversation` has one client's messages, which are in docs/how_to/serve_a_policy.md.
"""

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from rollflow.nodes.policies.space_text import described
from rollflow.policy.serving.items import item_from, pack, plain, unpack
from rollflow.policy.serving.request import (
    PROTOCOL,
    Acted,
    ActRequest,
    OwnSession,
    RequestError,
    ServingError,
    UnknownPolicyError,
)
from rollflow.policy.serving.shelf import Shelf
from rollflow.stream.data.errors import shown
from rollflow.stream.data.tree import Tree, stack_trees, tree_at

_FIELDS = {"observation", "reward", "session", "begins", "number", "version"}
# Fields of many observations, and the field of each.
_COLUMNS = {"rewards": "reward", "sessions": "session", "begins": "begins", "numbers": "number"}
_BATCH_FIELDS = {"observations", "version", *_COLUMNS}
_MOST_UNDER_WAY = 256  # messages of one connection
_LEFT = 1000  # WebSocket's code of a connection that was closed on purpose


class AsyncFront:
    """Takes answers from the threads that act into an event loop."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf, self._loop = shelf, asyncio.get_running_loop()

    async def act(self, name: str, fields: Any, client: str | None = None) -> Acted:
        """The answer to a request for the action of a policy.

            fields    observation    an item of the observation space
                      reward         of the session's action before; may be missing
                      session        a text or a number; missing: an observation by itself
                      begins         true where an episode begins
                      number         of the request in its session, from 0 on; may be missing
                      version        of the policy, a text; missing: the session's own, or the newest
            client    whose session it is; None: it is the same one for all clients

        Raises ServingError: RequestError, with the field, where one is wrong.
        """
        _check_fields(fields, _FIELDS, "observation")
        space = self._shelf.newest(name).policy.observation_space
        observation = item_from(space, fields["observation"], "observation")
        return await self._submitted(name, self._request(fields, observation, client), fields.get("version"))

    async def act_batch(self, name: str, fields: Any, client: str | None = None) -> list[Acted | BaseException]:
        """The answers to `fields`: observations any[N, ...], and lists of N of the other fields, as `act` has them.

        Raises ServingError where a field is wrong, and returns it where only some observations have no action.
        """
        _check_fields(fields, _BATCH_FIELDS, "observations")
        columns = {column: fields[column] for column in _COLUMNS if fields.get(column) is not None}
        if "sessions" not in columns:
            raise RequestError("'sessions' is missing, expected a list with one for each observation, null for none")
        for column, values in columns.items():
            if not isinstance(values, list) or len(values) != len(columns["sessions"]) or not values:
                raise RequestError(f"'{column}' is {shown(values)}, expected a list with one for each of 'sessions'")
        count = len(columns["sessions"])
        space = self._shelf.newest(name).policy.observation_space
        rows = item_from(space, fields["observations"], "observations", (count,))
        places = [{_COLUMNS[column]: values[row] for column, values in columns.items()} for row in range(count)]
        requests = [self._request(place, tree_at(rows, row), client) for row, place in enumerate(places)]
        answers = [self._submitted(name, request, fields.get("version")) for request in requests]
        return await asyncio.gather(*answers, return_exceptions=True)

    def deliver(self, outcomes: Sequence[tuple[asyncio.Future[Acted], Acted | Exception]]) -> None:
        """Set the futures; called from another thread."""
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._set, outcomes)

    def _submitted(self, name: str, request: ActRequest, version: Any) -> asyncio.Future[Acted]:
        """What becomes of a request, which is submitted now."""
        answer: asyncio.Future[Acted] = request.ticket
        if not isinstance(version, str | None):
            raise RequestError(f"'version' is {shown(version)}, expected a text")
        try:
            self._shelf.submit(name, request, version)
        except ServingError as error:
            answer.set_exception(error)
        return answer

    def _request(self, fields: Mapping[str, Any], observation: Tree, client: str | None) -> ActRequest:
        """A request for one observation out of the other fields."""
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
        owned = session if session is None or client is None else OwnSession(client, session)
        reward = math.nan if reward is None else float(reward)
        return ActRequest(owned, observation, reward, begins, number, self.deliver, self._loop.create_future())

    @staticmethod
    def _set(outcomes: Sequence[tuple[asyncio.Future[Acted], Acted | Exception]]) -> None:
        for answer, outcome in outcomes:
            if answer.done():  # whoever asked has gone
                continue
            if isinstance(outcome, Exception):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)


class Conversation:
    """One client's messages over an accepted WebSocket; each is answered once it is acted on.

        clients    client's name for itself -> its newest conversation, of all of the server's
        policy     that acts where a message names none; None: the only one
        limit      bytes of a message, at most

    A client that has said `hello` has sessions of its own. They are forgotten where it leaves; where its connection
    breaks, they go on by the next one.
    """

    def __init__(
        self,
        socket: WebSocket,
        shelf: Shelf,
        front: AsyncFront,
        clients: dict[str, "Conversation"],
        *,
        policy: str | None,
        limit: int,
    ) -> None:
        self._socket, self._shelf, self._front, self._policy = socket, shelf, front, policy
        self._clients, self._limit = clients, limit
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
        name = self._name(fields.get("policy", self._policy))
        if "forget" in fields:
            session = rest["forget"]
            owned = session if self._client is None else OwnSession(self._client, session)
            return {"forgotten": self._shelf.forget(name, owned)}
        if "observations" in fields:
            return _batch_fields(await self._front.act_batch(name, rest, self._client))
        return acted_fields(await self._front.act(name, rest, self._client))

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
        return {"hello": PROTOCOL, "max_bytes": self._limit, "policies": policies}

    def _name(self, name: Any) -> str:
        names = self._shelf.names
        if name is None and len(names) == 1:
            return names[0]
        if not isinstance(name, str):
            served = ", ".join(names) or "none"
            raise UnknownPolicyError(f"'policy' is {shown(name)}, expected one of those that are served: {served}")
        return name


def description_of(shelf: Shelf, name: str) -> dict[str, Any]:
    """A served policy in plain values: versions, spaces, and whether sessions have a memory."""
    newest = shelf.newest(name)
    return {
        "name": name,
        "version": newest.version,
        "versions": list(shelf.versions(name)),
        "observation_space": described(newest.policy.observation_space),
        "action_space": described(newest.policy.action_space),
        "has_memory": newest.has_memory,
    }


def acted_fields(acted: Acted) -> dict[str, Any]:
    """An answer as clients get it."""
    return {"action": acted.action, "version": acted.version, "weights": acted.weights, "number": acted.number}


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
