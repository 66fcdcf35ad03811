"""Descriptions of served policies: their spaces and versions, and the OpenAPI document that is made from them."""

from typing import Any

from rollflow.policy.serving.items import schema_of
from rollflow.policy.serving.shelf import Shelf

_STATUSES = {
    "401": "the secret is missing or wrong",
    "404": "no policy of this name or version is served",
    "410": "the session has no memory here; begin it anew",
    "413": "the request is too large",
    "422": "a field is malformed; the text names it",
    "429": "too many requests wait; ask again later",
    "500": "the policy failed",
    "503": "the server is closing",
}


def description_of(shelf: Shelf, name: str) -> dict[str, Any]:
    """A served policy in plain values: versions, spaces as JSON schemas, and whether sessions have a memory."""
    newest = shelf.newest(name)
    return {
        "name": name,
        "version": newest.version,
        "versions": list(shelf.versions(name)),
        "observation": schema_of(newest.policy.observation_space),
        "action": schema_of(newest.policy.action_space),
        "has_memory": newest.has_memory,
    }


def api_of(shelf: Shelf) -> dict[str, Any]:
    """The OpenAPI document of a server, with the spaces of its policies."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "rollflow policies", "version": "1"},
        "paths": {f"/v1/policies/{name}/act": {"post": _act_of(shelf, name)} for name in shelf.names},
    }


def _act_of(shelf: Shelf, name: str) -> dict[str, Any]:
    described = description_of(shelf, name)
    request = {
        "observation": described["observation"],
        "reward": {"type": "number", "description": "for the session's action before"},
        "session": {"type": ["string", "integer"], "description": "whose memory acts"},
        "begins": {"type": "boolean", "description": "true where an episode begins"},
        "number": {"type": "integer", "minimum": 0, "description": "of the request in its session"},
        "version": {"type": "string", "description": "of the policy"},
    }
    answer = {
        "action": described["action"],
        "version": {"type": "string"},
        "weights": {"type": "integer"},
        "number": {"type": ["integer", "null"]},
    }
    return {
        "operationId": f"act_{name}",
        "requestBody": {"required": True, "content": _content(request, ["observation"])},
        "responses": {
            "200": {"description": "the action", "content": _content(answer, list(answer))},
            **{
                status: {"description": text, "content": _content({"error": {"type": "string"}}, ["error"])}
                for status, text in _STATUSES.items()
            },
        },
    }


def _content(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {media: {"schema": schema} for media in ("application/json", "application/msgpack")}
