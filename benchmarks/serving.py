"""A policy that acts without a rollout, each way of it beside what it is made of.

`act` may take 1.5 times as long as the bare forward pass with sampling, and 20 µs more. `act_batch` is held against a
rollout over environments that do nothing, and loading against 100 ms, beyond importing torch. A program and an ONNX
program are held against the class. Over HTTP, 64 clients ask in a closed loop, and the bare framework with the same
forward pass answers as many; the 99th percentile of what an answer takes, over the median, is shown for both. Steps
are calls for one environment's action.

    python -m benchmarks.serving [--quick]
"""

import json
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from time import perf_counter, sleep

import numpy as np
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from benchmarks.command import run
from benchmarks.envs import NoopEnv
from benchmarks.pairs import Record, Run, Sizes, in_turns, paired, record, steps_per_s, within
from rollflow.nodes import Rollout
from rollflow.nodes.policies.artifact import parts_of
from rollflow.nodes.policies.artifact_files import read_files
from rollflow.policy import OnnxPolicy, Policy
from rollflow.policy.serving import HttpServer, Shelf

HIDDENS, BATCH, CALLS = (64, 64), 64, 50
TIMES, MORE_S, LOAD_S = 1.5, 20e-6, 0.1


def measure(sizes: Sizes, batch: int = BATCH) -> list[Record]:
    """A line each for `act`, `act_batch`, sessions in varying company, programs, `load`, and two for HTTP."""
    with _rollout(1) as rollout:
        policy, likeliest = rollout.policy(explore=True), rollout.policy()
    records = [_act(policy, sizes), _act_batch(batch, sizes), *_company(batch, sizes), *_programs(likeliest, sizes)]
    return [*records, _load(policy, sizes), *_http(policy, batch, sizes)]


def _rollout(slots: int, *, lstm: bool = False) -> Rollout:
    config = {"fcnet_hiddens": HIDDENS, "use_lstm": lstm, "lstm_cell_size": HIDDENS[0]}
    return Rollout(NoopEnv(slots), model_config=config, fragment_length=CALLS, seed=0)


def _act(policy: Policy, sizes: Sizes) -> Record:
    observation, module = np.zeros(4, np.float32), policy.module

    def ours() -> int:
        for _ in range(CALLS):
            policy.act(observation)
        return CALLS

    def bare() -> int:
        for _ in range(CALLS):
            with torch.inference_mode():
                output = module.forward_exploration({"obs": torch.from_numpy(observation[None])})
                torch.distributions.Categorical(logits=output["action_dist_inputs"]).sample().numpy()
        return CALLS

    for each in (ours, bare):
        steps_per_s(each, sizes.seconds / 2)  # warm up
    pairs = in_turns(lambda: steps_per_s(ours, sizes.seconds), lambda: steps_per_s(bare, sizes.seconds), sizes.rounds)
    allowed = [(mine, 1 / (TIMES / other + MORE_S)) for mine, other in pairs]
    return record("act, one observation", 1, allowed, aim=1.0, beside_name="1.5 × the bare pass with sampling + 20 µs")


def _act_batch(slots: int, sizes: Sizes) -> Record:
    observations, rewards = np.zeros((slots, 4), np.float32), np.zeros(slots, np.float32)
    with _rollout(slots) as rollout:
        policy = rollout.policy(explore=True)
        fragments = iter(rollout.fragments())

        def ours() -> int:
            for _ in range(CALLS):
                policy.act_batch(observations, rewards)
            return CALLS * slots

        def theirs() -> int:
            next(fragments)
            return CALLS * slots

        return paired("act_batch", slots, ours, theirs, aim=0.9, sizes=sizes, beside_name="the rollout's own rate")


def _company(slots: int, sizes: Sizes) -> list[Record]:
    """Batches of sessions drawn anew each time from four times as many, beside batches of the same ones."""
    observations, rng = np.zeros((slots, 4), np.float32), np.random.default_rng(0)
    records = []
    for lstm in (False, True):
        with _rollout(1, lstm=lstm) as rollout:
            varying, same = rollout.policy(), rollout.policy()

        def ours(policy: Policy = varying) -> int:
            for _ in range(CALLS):
                policy.act_batch(observations, sessions=rng.permutation(4 * slots)[:slots].tolist())
            return CALLS * slots

        def beside(policy: Policy = same) -> int:
            for _ in range(CALLS):
                policy.act_batch(observations)
            return CALLS * slots

        name = f"varying sessions, {'LSTM' if lstm else 'MLP'}"
        records.append(paired(name, slots, ours, beside, aim=None, sizes=sizes, beside_name="the same sessions"))
    return records


def _load(policy: Policy, sizes: Sizes) -> Record:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "policy")
        policy.save(path)
        times = []
        for _ in range(sizes.rounds + 1):
            began = perf_counter()
            Policy.load(path)
            times.append(perf_counter() - began)
    milliseconds = sorted(times[1:] or times)[len(times[1:]) // 2] * 1e3
    return within("load, ms", 1, milliseconds, LOAD_S * 1e3, milliseconds=round(milliseconds, 1), beside_name="100 ms")


def _programs(policy: Policy, sizes: Sizes) -> list[Record]:
    """`act` by a program, and in onnxruntime, beside `act` by the class."""
    observation = np.zeros(4, np.float32)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "policy")
        policy.save(path, program=True, onnx=True)
        manifest, files = read_files(path)
        by_program = Policy(
            parts_of(manifest, files, (), as_program=True).module, policy.env_to_module, policy.module_to_env
        )
        in_onnxruntime = OnnxPolicy.load(path)

    def calls(actor: Policy | OnnxPolicy) -> Run:
        def run() -> int:
            for _ in range(CALLS):
                actor.act(observation)
            return CALLS

        return run

    named = {"act by a program": by_program, "act in onnxruntime": in_onnxruntime}
    return [
        paired(name, 1, calls(actor), calls(policy), aim=None, sizes=sizes, beside_name="by the class")
        for name, actor in named.items()
    ]


def _http(policy: Policy, clients: int, sizes: Sizes) -> list[Record]:
    shelf = Shelf()
    shelf.put("mlp", policy, version="1")
    bare = uvicorn.Server(uvicorn.Config(_bare_application(policy), port=0, log_level="warning", access_log=False))
    thread = threading.Thread(target=bare.run)
    shares: list[float] = []  # the 99th percentile over the median
    beside_shares: list[float] = []

    def asked(port: int, path: str) -> dict[str, float]:
        command = [sys.executable, "-m", "benchmarks.http_clients", str(port), path, str(clients), str(sizes.seconds)]
        answer: dict[str, float] = json.loads(
            subprocess.run(command, capture_output=True, text=True, check=True).stdout
        )
        return answer

    def ours() -> float:
        answer = asked(int(server.url.rpartition(":")[2]), "/v1/policies/mlp/act")
        shares.append(answer["p99_ms"] / answer["median_ms"])
        return answer["answers_per_s"]

    def theirs() -> float:
        answer = asked(bare.servers[0].sockets[0].getsockname()[1], "/act")
        beside_shares.append(answer["p99_ms"] / answer["median_ms"])
        return answer["answers_per_s"]

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
        with torch.inference_mode():
            output = module.forward_exploration({"obs": torch.from_numpy(observation[None])})
            action = torch.distributions.Categorical(logits=output["action_dist_inputs"]).sample().numpy()
        return JSONResponse({"action": action[0].item()})

    return Starlette(routes=[Route("/act", act, methods=["POST"])])


if __name__ == "__main__":
    run(measure)
