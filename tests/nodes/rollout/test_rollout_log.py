"""What a rollout logs, however it runs and ends."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import gymnasium as gym
import pytest
from anyio import to_thread
from graph_rows import drawn
from leftovers import held_here
from numbered_agents import NumberedAgents
from numbered_env import BreakingEnv
from numbered_module import NumberedEnv, NumberedModule
from places import PLACES

from rollflow import MultiAgentRollout, Rollout, Watch
from rollflow.nodes import EpisodeReturns, RandomModule
from rollflow.nodes.logs import destinations
from rollflow.nodes.logs.figures import OWN, PLACE, figure_of
from rollflow.stream.data.errors import MetricsError

SELDOM = 3600.0  # the last row is the only one
STAGES = {"env", "env_to_module", "module", "module_to_env"}


def rollout_of(path: Path, env: Any = NumberedEnv, **options: Any) -> Rollout:
    options = {"num_fragments": 3, "fragment_length": 8, "seed": 0, "watch": Watch(log_every=SELDOM), **options}
    return Rollout([partial(env, 0), partial(env, 1)], module=NumberedModule(), log=f"jsonl:{path}", **options)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("place", PLACES)
def test_the_last_row_has_what_the_rollout_says_of_itself(tmp_path: Path, place: str) -> None:
    path = tmp_path / "run.jsonl"
    with rollout_of(path, **PLACES[place]) as rollout:
        for number, _ in enumerate(rollout.batches()):
            rollout.log("train/loss", number)
            rollout.metrics.log_value(("filter", "mean"), 2.0)
    [row] = rows_of(path)
    assert row["steps"] == row["time/total_timesteps"] == rollout.num_steps
    assert row["updates"] == row["time/iterations"] == number + 1
    assert row["rollout/ep_rew_mean"] == pytest.approx(rollout.returns.mean)
    assert row["rollout/episodes"] == rollout.returns.count > 0
    assert row["train/loss"] == pytest.approx(number / 2)
    assert (row["metrics/filter/mean"], row["policy/version"], row["policy/lag"]) == (2.0, 0, 0)
    assert {name for name in row if name.startswith("busy/")} >= {f"busy/{stage}" for stage in (*STAGES, "caller")}
    assert {cause: row[f"lost/{cause}"] for cause in rollout.lost} == rollout.lost
    assert [name for name in row if figure_of(name) is OWN] == [*PLACE, "train/loss"]
    assert [thread.name for thread in threading.enumerate() if "log" in thread.name] == []


def test_lag_counts_the_versions_that_a_fragment_is_behind(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with rollout_of(path, lanes=2) as rollout:
        fragments = rollout.fragments()
        next(fragments)
        for _ in range(2):
            rollout.publish(rollout.module.state_dict())
        rollout.log.make_row()
        next(fragments)  # of the same round
        rollout.log("train/loss", 1.0)
    assert [(row["policy/lag"], row["policy/version"]) for row in rows_of(path)] == [(0, 2), (2, 2)]


def test_the_age_of_fragments_is_looked_at_once_for_each_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with rollout_of(tmp_path / "run.jsonl", num_fragments=12) as rollout:
        looked = []
        monkeypatch.setattr(rollout.lag, "lag", lambda fragment: looked.append(fragment.sequence) or 0)
        for number, _ in enumerate(rollout.batches()):
            if number == 5:
                rollout.log.make_row()
    assert looked == [0, 6]


def test_without_a_log_nothing_is_measured_and_ones_own_values_go_nowhere() -> None:
    with Rollout(
        lambda: NumberedEnv(0), module=NumberedModule(), num_fragments=1, watch=Watch(stall_after=None)
    ) as rollout:
        for _ in rollout.batches():
            rollout.log("train/loss", 1.0)
            assert not [thread for thread in threading.enumerate() if thread.name.startswith("rollflow log")]
    assert rollout.lag.last is None
    assert rollout.log._own == {}


def test_several_agents_have_returns_and_versions_by_module(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    acts: Any = {"module": {"a": RandomModule, "b": RandomModule}}
    acts["agent_to_module_mapping_fn"] = {"agent 0": "a", "agent 1": "b"}
    logs: Any = {"log": [f"jsonl:{path}"], "watch": Watch(log_every=SELDOM)}
    env = partial(NumberedAgents, 0, agents=2, nested=0, at_once=True)
    rollout = MultiAgentRollout(env, fragment_length=16, num_fragments=2, seed=0, **acts, **logs)
    with rollout:
        for _ in rollout.batches():
            rollout.log("train/loss", 1.0)
    [row] = rows_of(path)
    assert (row["policy/version/a"], row["policy/version/b"], row["policy/lag"]) == (0, 0, 0)
    for module_id, returns in rollout.returns.by_module.items():
        assert row[f"rollout/ep_rew_mean/{module_id}"] == pytest.approx(returns.mean)
    assert row["rollout/ep_rew_mean"] == pytest.approx(rollout.returns.mean)


async def test_an_async_loop_is_logged(tmp_path: Path, anyio_backend: Any) -> None:
    path = tmp_path / "run.jsonl"
    async with rollout_of(path) as rollout:
        async for _ in rollout.batches():
            await to_thread.run_sync(rollout.log, "train/loss", 1.0)
    [row] = rows_of(path)
    assert (row["updates"], row["train/loss"], row["steps"]) == (3, 1.0, rollout.num_steps)


async def test_in_a_graph_the_log_runs_with_the_graph(tmp_path: Path, anyio_backend: Any) -> None:
    path, returns = tmp_path / "run.jsonl", EpisodeReturns()
    rollout = rollout_of(path)
    async with drawn("rollout > returns", rollout=rollout, returns=returns).run() as run:
        rollout.log("train/loss", 1.0)
        await run.wait()
    [row] = rows_of(path)
    assert (row["steps"], row["updates"], row["train/loss"]) == (rollout.num_steps, 3, 1.0)
    assert row["rollout/ep_rew_mean"] == pytest.approx(returns.mean)
    assert row["policy/lag"] == 0
    assert {name for name in row if name.startswith("busy/")} >= {f"busy/rollout/{stage}" for stage in STAGES}


def test_an_error_leaves_what_was_logged_before_it(tmp_path: Path) -> None:
    path, breaks = tmp_path / "run.jsonl", type("Breaks", (BreakingEnv,), {"after": 13})  # in its second fragment
    with pytest.raises(RuntimeError, match="it broke"), rollout_of(path, breaks) as rollout:
        for _ in rollout.batches():
            rollout.log("train/loss", 1.0)
    [row] = rows_of(path)
    assert (row["train/loss"], row["lost/failed"]) == (1.0, rollout.lost["failed"])


@pytest.mark.slow
def test_ctrl_c_leaves_what_was_logged_before_it(tmp_path: Path) -> None:
    program = (
        "from rollflow import Rollout, Watch\n"
        "with Rollout('CartPole-v1', seed=0, log='jsonl:run.jsonl', watch=Watch(log_every=3600)) as rollout:\n"
        "    for number, batch in enumerate(rollout.batches()):\n"
        "        rollout.log('train/loss', 0.5)\n"
        "        if number == 1:\n"
        "            print('go', flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "go\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert "\nKeyboardInterrupt\n" in errors, errors  # a note may say which step it broke off
    assert "chain.py" not in errors, errors  # nor any other frame of rollflow's inside
    [row] = rows_of(tmp_path / "run.jsonl")
    assert row["train/loss"] == 0.5
    assert row["time/iterations"] >= 2


def test_a_log_that_cannot_be_opened_closes_the_environments(tmp_path: Path) -> None:
    before = held_here()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        log = [f"jsonl:{tmp_path}/run.jsonl", f"prometheus:{taken.getsockname()[1]}"]
        rollout = Rollout(lambda: NumberedEnv(0), module=NumberedModule(), log=log)
        with pytest.raises(OSError, match="expected a free port"):
            rollout.start()
    assert rollout.environments.is_closed
    assert held_here() == before


@pytest.mark.parametrize("kind", [Rollout, MultiAgentRollout])
def test_what_cannot_be_logged_to_is_refused_before_an_environment_is_made(kind: Any) -> None:
    def make() -> gym.Env[Any, Any]:
        raise AssertionError("an environment was made")

    with pytest.raises(MetricsError, match="log is 'tensorbord:runs', expected KIND:TARGET"):
        kind(make, log="tensorbord:runs")


def test_a_rollout_that_never_runs_leaves_no_file(tmp_path: Path) -> None:
    rollout = rollout_of(tmp_path / "new" / "run.jsonl")
    rollout.close()
    assert os.listdir(tmp_path) == []


@pytest.mark.anyio
async def test_other_tasks_go_on_while_a_log_is_written_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    is_writing, other_went_on = threading.Event(), threading.Event()
    in_time: list[bool] = []

    class Patient:
        open = staticmethod(lambda last: None)
        close = staticmethod(lambda: None)

        def write(self, row: Any) -> None:
            is_writing.set()
            in_time.append(other_went_on.wait(60))

    async def other() -> None:
        await to_thread.run_sync(is_writing.wait)
        other_went_on.set()

    monkeypatch.setattr(destinations, "KINDS", {"patient": (lambda target: Patient(), "", "")})
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(other)
        async with Rollout(
            "CartPole-v1", num_fragments=1, seed=0, log="patient:", watch=Watch(log_every=SELDOM)
        ) as rollout:
            async for _ in rollout.batches():
                pass
    assert in_time == [True]
