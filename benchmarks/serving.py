"""A policy that acts without a rollout, each way of it beside what it is made of.

`act` may take 1.5 times as long as the bare forward pass with sampling, and 20 µs more; RLlib's pipelines and module
act beside it and beside that pass, where RLlib is installed. `act_batch` is held against a rollout over environments
that do nothing, and loading against 100 ms, beyond importing torch. An ONNX program is held against the class.
64 clients ask in a closed loop over HTTP, beside the bare framework with the same forward pass; so is the 99th
percentile of what an answer takes, over the median. Steps are calls for one environment's action.

    python -m benchmarks.serving [--quick]
"""

import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.envs import NoopEnv
from benchmarks.pairs import Record, Run, Sizes, in_turns, paired, record, steps_per_s, within
from benchmarks.serving_parts import sampled
from rollflow import Policy, Rollout
from rollflow.policy import OnnxPolicy

HIDDENS, BATCH, CALLS = (64, 64), 64, 50
TIMES, MORE_S, LOAD_S = 1.5, 20e-6, 0.1


def measure(sizes: Sizes, batch: int = BATCH) -> list[Record]:
    """A line each for `act`, beside RLlib too, `act_batch`, sessions in varying company, ONNX, `load`, and clients.

    Those over HTTP are left out where the extra `serve` is not installed.
    """
    with _rollout(1) as rollout:
        policy, likeliest = rollout.policy(explore=True), rollout.policy()
    records = [_act(policy, sizes), *_beside_rllib(policy, sizes), _act_batch(batch, sizes), *_company(batch, sizes)]
    for package, name, more in (
        ("onnxscript", "onnxruntime", lambda: _in_onnxruntime(likeliest, sizes)),
        ("starlette", "HTTP", lambda: _http(policy, batch, sizes)),
    ):
        if importlib.util.find_spec(package) is None:
            print(f"{name}: left out, {package} is not installed here", file=sys.stderr)
        else:
            records += more()
    return [*records, *_load(policy, sizes)]


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
            sampled(module, observation[None])
        return CALLS

    for each in (ours, bare):
        steps_per_s(each, sizes.seconds / 2)  # warm up
    pairs = in_turns(lambda: steps_per_s(ours, sizes.seconds), lambda: steps_per_s(bare, sizes.seconds), sizes.rounds)
    allowed = [(mine, 1 / (TIMES / other + MORE_S)) for mine, other in pairs]
    return record("act, one observation", 1, allowed, aim=1.0, beside_name="1.5 × the bare pass with sampling + 20 µs")


def _beside_rllib(policy: Policy, sizes: Sizes) -> list[Record]:
    if importlib.util.find_spec("ray") is None:
        print("RLlib: left out, it is not installed here", file=sys.stderr)
        return []
    from benchmarks.peers.rllib import Actor

    observation, actor = np.zeros(4, np.float32), Actor()

    def ours() -> int:
        for _ in range(CALLS):
            policy.act(observation)
        return CALLS

    def bare() -> int:
        for _ in range(CALLS):
            sampled(policy.module, observation[None])
        return CALLS

    def theirs() -> int:
        return actor.calls(observation, CALLS)

    return [
        paired("act, beside RLlib", 1, ours, theirs, aim=10.0, sizes=sizes, beside_name="RLlib's parts"),
        paired("bare pass, beside RLlib", 1, bare, theirs, aim=None, sizes=sizes, beside_name="RLlib's parts"),
    ]


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


LOADING = """
import sys, time
import torch
marks = [time.perf_counter()]
from rollflow import Policy
Policy
marks.append(time.perf_counter())
Policy.load(sys.argv[1])
marks.append(time.perf_counter())
print(*(1e3 * (after - before) for before, after in zip(marks, marks[1:])))
"""


def _load(policy: Policy, sizes: Sizes) -> list[Record]:
    """Loading a policy in fresh processes, and importing `rollflow.policy` before, where torch is there already.

    They run bytecode that a process before them has compiled, as installed packages have it.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "policy")
        policy.save(path)
        command = [sys.executable, "-c", LOADING, str(path)]
        env = {**os.environ, "PYTHONPYCACHEPREFIX": str(Path(folder, "compiled"))}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        _, *ran = [
            subprocess.run(command, capture_output=True, text=True, check=True, env=env)
            for _ in range(1 + sizes.rounds)
        ]
    parts = ("import rollflow.policy, ms", None), ("load, ms", 1.0)
    records = []
    for (name, aim), times in zip(
        parts, zip(*(map(float, each.stdout.split()) for each in ran), strict=True), strict=True
    ):
        took = statistics.median(times)
        line = within(name, 1, took, LOAD_S * 1e3, milliseconds=round(took, 1), beside_name="100 ms")
        records.append(line | {"aim": aim, "runs": sizes.rounds})
    return records


def _in_onnxruntime(policy: Policy, sizes: Sizes) -> list[Record]:
    """`act` in onnxruntime, beside `act` by the class."""
    observation = np.zeros(4, np.float32)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "policy.onnx")
        policy.export_onnx(path)
        in_onnxruntime = OnnxPolicy.load(path)

    def calls(actor: Policy | OnnxPolicy) -> Run:
        def run() -> int:
            for _ in range(CALLS):
                actor.act(observation)
            return CALLS

        return run

    runs = calls(in_onnxruntime), calls(policy)
    return [paired("act in onnxruntime", 1, *runs, aim=None, sizes=sizes, beside_name="by the class")]


def _http(policy: Policy, clients: int, sizes: Sizes) -> list[Record]:
    from benchmarks.serving_http import over_http

    return over_http(policy, clients, sizes)
