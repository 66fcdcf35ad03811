"""Everything can be imported on systems that lack names of Linux's, and what steps in one process runs there."""

import subprocess
import sys

import pytest
from other_systems import SYSTEMS

_IMPORTS = """
import importlib

for package in ("stream", "nodes", "sinks", "policy", "cli"):
    module = importlib.import_module(f"rollflow.{package}")
    for name in dir(module):
        getattr(module, name)
"""

_RUNS = """
from rollflow import Rollout
from rollflow import Replay
from rollflow.sinks import LearnerPipeline
from rollflow import Graph

given = {"num_envs": 4, "fragment_length": 8, "num_fragments": 2, "seed": 0}
for place in {"where": "inline"}, {"where": "threads", "lanes": 2}, {"prefetch": 1}:
    with Rollout("CartPole-v1", **given, **place) as rollout:
        assert sum(len(batch["obs"]) for batch in rollout.batches()) == rollout.num_steps > 0

rollout = Rollout("CartPole-v1", **given)
replay, graph = Replay(1000, batch_size=8), Graph("run")
graph.add(rollout=rollout, replay=replay, learner=LearnerPipeline(rollout.learner_pipeline, rollout.module))
graph.connect("rollout.fragments", "replay")
graph.connect("rollout.fragments", "learner")
graph.output("sampled", "replay.batches")
graph.output("batches", "learner.batches")


async def main():
    async with graph.run() as run, anyio.create_task_group() as tasks:
        sampled = [await run["sampled"].receive()]
        assert len(sampled[0]["obs"]) == 8
        assert sum([len(batch["obs"]) async for batch in run["batches"]]) > 0


anyio.run(main)
"""

_REFUSALS = """
from rollflow import RemoteEnvs, Rollout
from rollflow.stream import EnvError

places = [{"env": "CartPole-v1", "where": where} for where in ("processes", "rollouts")] if {lacks_sockets} else []
for place in [*places, {"env": RemoteEnvs.listen("tcp://127.0.0.1:0")}]:
    try:
        Rollout(**place)
    except EnvError as error:
        assert f"can't run on this system, {sys.platform}, which has no " in str(error), error
        assert str(error).endswith("where='inline' and where='threads' run everywhere")
    else:
        raise AssertionError(place)
"""


def run_on(system: str, program: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", SYSTEMS[system] + program], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_what_steps_in_one_process_runs_without_what_linux_alone_has(system: str) -> None:
    refusals = _REFUSALS.replace("{lacks_sockets}", str(system == "windows"))
    run_on(system, _IMPORTS + _RUNS + refusals)


def test_an_import_that_fails_says_why() -> None:
    program = """
import sys
sys.modules["gymnasium.vector"] = None
import rollflow.nodes
try:
    rollflow.nodes.Rollout
except ImportError as error:
    assert "gymnasium.vector" in str(error)
else:
    raise AssertionError
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
