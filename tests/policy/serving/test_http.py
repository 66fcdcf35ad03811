"""Policies over HTTP and WebSocket, by a real server: answers, refusals, and what clients can do wrong."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import httpx
import numpy as np
import pytest
from gymnasium import spaces
from served_policies import Echo, Held, Sums, policy_of, served
from websockets.sync.client import connect

from rollflow.policy.serving import BatchOptions
from rollflow.policy.serving.http import HttpServer
from rollflow.policy.serving.request import CONTENT_TYPE, RequestError, item_from, pack, unpack
from rollflow.policy.serving.shelf import Shelf
from rollflow.stream import WireError


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    names = ("echo", "sums")
    with served(policy_of(Echo), policy_of(Sums), names=names, secret=None, max_body=4096) as (_, server):
        yield server


def ask(server: HttpServer, name: str = "echo", **fields: Any) -> httpx.Response:
    """The response to a request for an action."""
    return httpx.post(f"{server.url}/v1/policies/{name}/act", json=fields)


def test_an_action_in_json(server: HttpServer) -> None:
    response = ask(server, observation=[3, 4])
    assert response.status_code == 200
    assert response.json() == {"action": [3.0, 0.0], "version": "1", "weights": 0}


def test_an_action_in_msgpack_with_arrays(server: HttpServer) -> None:
    body = pack({"observation": np.array([3.0, 4.0], np.float32), "session": "a"})
    headers = {"content-type": CONTENT_TYPE, "accept": CONTENT_TYPE}
    response = httpx.post(f"{server.url}/v1/policies/echo/act", content=body, headers=headers)
    answer = unpack(response.content)
    assert (answer["action"].dtype, answer["action"].tolist()) == (np.float32, [3.0, 0.0])


@pytest.mark.parametrize(
    ("fields", "status", "text"),
    [
        ({}, 422, "'observation' is missing"),
        ({"observation": [1]}, 422, "observation has shape [1], expected float32[2]"),
        ({"observation": [1, [2]]}, 422, "observation is a ragged list, expected float32[2]"),
        ({"observation": "ab"}, 422, "observation is a text, expected float32[2]"),
        ({"observation": None}, 422, "observation is null, expected float32[2]"),
        ({"observation": [1, "ab"]}, 422, "observation[1] is a text, expected float32[2] for observation"),
        ({"observation": [1, None]}, 422, "observation[1] is null, expected float32[2] for observation"),
        ({"observation": {"a": 1}}, 422, "observation is an object, expected float32[2]"),
        ({"observation": [1, 2], "reward": "x"}, 422, "'reward' is 'x', expected a finite number"),
        ({"observation": [1, 2], "session": [1]}, 422, "'session' is [1], expected a text or a whole number"),
        ({"observation": [1, 2], "begins": 1}, 422, "'begins' is 1, expected true or false"),
        ({"observation": [1, 2], "sesion": "a"}, 422, "unknown field 'sesion', expected begins, observation"),
        ({"observation": [13, 2]}, 500, "ValueError: thirteen"),
    ],
)
def test_what_is_wrong_is_named(server: HttpServer, fields: dict[str, Any], status: int, text: str) -> None:
    response = ask(server, **fields)
    assert response.status_code == status
    assert response.json()["error"].startswith(text)
    assert ask(server, observation=[1, 2]).status_code == 200


@pytest.mark.parametrize(
    ("body", "kind", "status", "text"),
    [
        (b"{", "application/json", 422, "the body is no JSON"),
        (b"[" * 4000, "application/json", 422, "the body is no JSON"),
        (b"[1]", "application/json", 422, "the request is list, expected an object"),
        (b'{"observation": [NaN, 1]}', "application/json", 422, "observation has NaN"),
        (b"\xc1", CONTENT_TYPE, 422, "the message is no msgpack"),
        (b"x", "text/plain", 422, "content-type is 'text/plain', expected 'application/json'"),
        (b"0" * 5000, "application/json", 413, "the body is larger than 4096 bytes"),
        (
            pack({"observation": {b"__ndarray__": True, b"data": b"cposix\nsystem", b"dtype": "O", b"shape": [1]}}),
            CONTENT_TYPE,
            422,
            "an array has dtype object, expected numbers",
        ),
        (
            pack({"observation": {b"__ndarray__": True, b"data": b"1234", b"dtype": "<f4", b"shape": [1 << 40]}}),
            CONTENT_TYPE,
            422,
            "an array can't be read",
        ),
    ],
)
def test_what_is_no_request_is_refused(server: HttpServer, body: bytes, kind: str, status: int, text: str) -> None:
    response = httpx.post(f"{server.url}/v1/policies/echo/act", content=body, headers={"content-type": kind})
    assert (response.status_code, response.json()["error"][: len(text)]) == (status, text)


@pytest.mark.parametrize(
    ("space", "good", "bad"),
    [
        (spaces.Discrete(3, start=-1), -1, 2),
        (spaces.MultiDiscrete([2, 3]), [1, 2], [1, 3]),
        (spaces.MultiBinary(2), [0, 1], [0, 2]),
    ],
)
def test_what_lies_outside_of_a_discrete_space_is_named_with_its_place(
    space: Any, good: Any, bad: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A batch is looked at as a whole: to ask the space item by item takes a hundred times as long.
    monkeypatch.delattr(type(space), "contains")
    assert item_from(space, good, "observation").tolist() == good
    assert item_from(space, [good, good], "observations", (2,)).tolist() == [good, good]
    with pytest.raises(RequestError, match=f"^observation is {re.escape(str(bad))}, expected an item of"):
        item_from(space, bad, "observation")
    with pytest.raises(RequestError, match=f"^observations of observation 1 is {re.escape(str(bad))}, expected"):
        item_from(space, [good, bad], "observations", (2,))


def test_policies_describe_themselves(server: HttpServer) -> None:
    listed = httpx.get(f"{server.url}/v1/policies").json()["policies"]
    shown = [(each["name"], each["version"], each["has_memory"]) for each in listed]
    assert shown == [("echo", "1", False), ("sums", "1", True)]
    assert listed[0]["observation_space"]["shape"] == [2]
    assert httpx.get(f"{server.url}/v1/policies/none").status_code == 404


def test_probes_and_metrics() -> None:
    with served(names=["echo"], secret=None) as (shelf, server):
        assert [httpx.get(f"{server.url}/{probe}").status_code for probe in ("health", "ready")] == [200, 503]
        shelf.put("echo", policy_of(Echo), "1")
        ask(server, observation=[1, 2])
        assert [httpx.get(f"{server.url}/{probe}").status_code for probe in ("health", "ready")] == [200, 200]
        metrics = httpx.get(f"{server.url}/metrics").text
    assert 'rollflow_serve_actions_total{policy="echo",version="1"} 1.0' in metrics
    assert 'rollflow_serve_batch_size_bucket{le="+Inf",policy="echo",version="1"} 1.0' in metrics


def test_a_request_too_many_gets_429() -> None:
    held = Held(policy_of(Echo))
    options = BatchOptions(max_waiting=1)
    with served(held, names=["echo"], options=options, secret=None) as (_, server), ThreadPoolExecutor(3) as clients:
        first = clients.submit(ask, server, observation=[0, 0])
        held.begun.acquire()
        others = [clients.submit(ask, server, observation=[1, 0]) for _ in range(2)]
        refused = next(as_completed(others)).result()
        held.go.release(2)
        assert (refused.status_code, refused.json()["error"][:24]) == (429, "1 requests wait already;")
        assert sorted(each.result().status_code for each in (first, *others)) == [200, 200, 429]


def test_a_secret_is_asked_for() -> None:
    with served(policy_of(Echo), names=["echo"], secret="open sesame") as (_, server):
        assert ask(server, observation=[1, 2]).status_code == 401
        for secret, status in (("open", 401), ("open sesame", 200)):
            headers = {"authorization": f"Bearer {secret}"}
            response = httpx.get(f"{server.url}/v1/policies", headers=headers)
            assert response.status_code == status
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_an_open_address_needs_a_secret() -> None:
    with pytest.raises(WireError, match=r"'tcp://0\.0\.0\.0:0' without a secret, expected one"):
        HttpServer(Shelf(), "0.0.0.0:0")


def test_an_address_that_is_taken_is_named(server: HttpServer) -> None:
    taken = server.url.removeprefix("http://")
    with pytest.raises(WireError, match=f"^can't listen on tcp://{taken}: Address already in use$"):
        HttpServer(Shelf(), taken)


def test_a_websocket_answers_one_message_after_the_other(server: HttpServer) -> None:
    with connect(f"{server.url.replace('http', 'ws')}/v1/stream") as socket:
        socket.send(json.dumps({"policy": "sums", "observation": [1, 0], "session": "a", "begins": True}))
        assert json.loads(socket.recv())["action"] == [1.0, 0.0]
        socket.send(pack({"policy": "sums", "observation": np.array([2, 0]), "session": "a"}))
        assert unpack(socket.recv())["action"].tolist() == [3.0, 0.0]
        socket.send(json.dumps({"policy": "sums", "observation": [1]}))
        refusal = json.loads(socket.recv())
        assert (refusal["status"], refusal["error"]) == (422, "observation has shape [1], expected float32[2]")
        socket.send(json.dumps({"policy": "sums", "observation": [4, 0], "session": "a"}))
        assert json.loads(socket.recv())["action"] == [7.0, 0.0]
