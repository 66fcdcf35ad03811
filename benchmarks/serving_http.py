"""Clients of an `HttpServer`, beside those of the bare framework with the same forward pass."""

import json
import statistics
import threading
from time import sleep

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from benchmarks.pairs import Record, Sizes, in_turns, record, within
from benchmarks.serving_parts import asked, sampled
from rollflow import Policy
from rollflow.policy.serving import HttpServer, Shelf


def over_http(policy: Policy, clients: int, sizes: Sizes) -> list[Record]:
    """Two lines: answers per second, and the 99th percentile of what an answer takes over the median."""
    shelf = Shelf()
    shelf.put("mlp", policy, version="1")
    bare = uvicorn.Server(uvicorn.Config(_bare_application(policy), port=0, log_level="warning", access_log=False))
    thread = threading.Thread(target=bare.run)
    shares: list[float] = []  # the 99th percentile over the median
    beside_shares: list[float] = []

    def rate(port: int, path: str, late: list[float]) -> float:
        answers_per_s, share = asked("http_clients", port, path, clients, sizes.seconds)
        late.append(share)
        return answers_per_s

    def ours() -> float:
        return rate(int(server.url.rpartition(":")[2]), "/v1/policies/mlp/act", shares)

    def theirs() -> float:
        return rate(bare.servers[0].sockets[0].getsockname()[1], "/act", beside_shares)

    with HttpServer(shelf, "127.0.0.1:0") as server:
        thread.start()
        while not bare.started:
            sleep(0.01)
        pairs = in_turns(ours, theirs, sizes.rounds)
        bare.should_exit = True
        thread.join()
    shelf.close()
    late, beside_late = statistics.median(shares), statistics.median(beside_shares)
    told = {"share": round(late, 2), "beside_share": round(beside_late, 2), "beside_name": "bare starlette"}
    return [
        record("act over HTTP", clients, pairs, aim=0.8, beside_name="bare starlette with the same forward pass"),
        within("HTTP, 99th percentile / median", clients, late, beside_late, **told) | {"aim": None},
    ]


def _bare_application(policy: Policy) -> Starlette:
    module = policy.module

    async def act(request: Request) -> JSONResponse:
        observation = np.asarray(json.loads(await request.body())["observation"], np.float32)
        return JSONResponse({"action": sampled(module, observation[None])[0].item()})

    return Starlette(routes=[Route("/act", act, methods=["POST"])])
