"""Rollouts over hosts that they start as processes of this machine."""

import os
import re
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import psutil
import pytest
import torch
from ending_agent_envs import logs_of
from leftovers import held_here, processes_of
from lost_agents import not_emitted
from numbered_module import NumberedModule
from remote_rollouts import check_counts, check_laws, taken_until
from started_hosts import LOG_VARIABLE, check_only_unfinished, missing_steps, pids_of, telling_agents, telling_env

from rollflow import MultiAgentRollout, Rollout
from rollflow.nodes import FlattenObservations, OnProcesses, OnRay
from rollflow.stream import EnvError, ModuleError


def flat(env: Any) -> FlattenObservations:
    return FlattenObservations()


def rollout_on(place: OnProcesses, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Rollout:
    monkeypatch.setenv(LOG_VARIABLE, str(folder))
    return Rollout(telling_env, where=place, **{"module": NumberedModule, "fragment_length": 8, "seed": 0, **options})


@pytest.mark.slow
def test_every_step_on_every_host_comes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = held_here()
    place = OnProcesses(num_hosts=2)
    with rollout_on(place, tmp_path, monkeypatch, num_envs=3, lanes=2, num_fragments=3) as rollout:
        assert (rollout.environments.num_lanes, rollout.environments.num_envs) == (4, 6)
        taken = list(rollout.fragments())
    assert len(pids_of(taken)) == 2
    check_laws(taken, rollout.lost, slots_lost=0)
    check_counts(taken, rollout)
    assert (missing_steps(taken, tmp_path), rollout.lost) == ({}, {})
    del rollout, taken
    assert held_here() == before


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_host_that_ends_comes_back_anew(how: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with rollout_on(OnProcesses(num_hosts=2), tmp_path, monkeypatch, num_envs=2, prefetch=1) as rollout:
        fragments = rollout.fragments()
        taken = taken_until(fragments, lambda taken: len(pids_of(taken)) == 2)
        [ending, other] = pids_of(taken)
        os.kill(ending, how)
        taken += taken_until(fragments, lambda more: len(pids_of(more) - {ending, other}) == 1)
        taken += [next(fragments) for _ in range(8)]
        assert other in pids_of(taken[-8:])
        rollout.drain()
        taken += list(fragments)
    missing, is_killed = missing_steps(taken, tmp_path), how is signal.SIGKILL
    check_laws(taken, rollout.lost, slots_lost=2 * 8 if is_killed else 0)
    check_counts(taken, rollout)
    assert rollout.lost.keys() == ({"workers"} if is_killed else set())
    if is_killed:
        check_only_unfinished(missing, {ending}, fragment_length=8)
    else:  # told to end, it hands over what there is
        assert missing == {}


@pytest.mark.slow
def test_hosts_whose_environment_can_not_be_made_say_so() -> None:
    before = processes_of()
    told = r"hosts fail again and again: host process-0 exited with code 1: rollflow: environment 'Nope-v0' can't be"
    with pytest.raises(EnvError, match=told):
        Rollout("Nope-v0", where=OnProcesses())
    assert processes_of() <= before


@pytest.mark.slow
def test_connectors_and_options_of_passes_reach_the_hosts() -> None:
    options: Any = {"env_to_module_connector": flat, "device": "cpu", "fragment_length": 4, "num_fragments": 1}
    with Rollout(partial(gym.make, "CartPole-v1"), where=OnProcesses(), **options) as rollout:
        [batch] = rollout.batches()
    assert batch["obs"].shape == (4, 4)
    assert rollout.evaluate(episodes=1).returns.shape == (1,)


def module_of(agent: str, episode: Any) -> str:
    return "first" if agent == "agent 0" else "second"


@pytest.mark.slow
def test_so_do_the_steps_of_several_agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOG_VARIABLE, str(tmp_path))
    options: Any = {"module": {"first": NumberedModule, "second": NumberedModule}, "fragment_length": 8, "seed": 0}
    options |= {"num_envs": 2, "lanes": 2, "agent_to_module_mapping_fn": module_of, "num_fragments": 3}
    with MultiAgentRollout(telling_agents, where=OnProcesses(num_hosts=2), **options) as rollout:
        assert (rollout.environments.num_lanes, rollout.environments.num_envs) == (4, 4)
        taken = list(rollout.fragments())
    assert {module_id for each in taken for module_id in each.module_ids} == {"first", "second"}
    slots = [int(path.name.removeprefix("pid ")) for path in tmp_path.glob("pid *")]
    assert len(slots) == 4
    assert not_emitted(taken, [log for slot in slots for log in logs_of(tmp_path, slot)]) == 0
    assert rollout.lost == {}


PROGRAM = """
from rollflow import Rollout
from rollflow.nodes import DefaultModule, OnProcesses

class Policy(DefaultModule):
    pass

{guard}
    with Rollout("CartPole-v1", where=OnProcesses(num_hosts=2), module=Policy, fragment_length=8) as rollout:
        for batch in rollout.batches():
            hosts = rollout.environments._supply._hosts
            print(*(each.program._worker.pid for each in hosts), flush=True)
"""


@pytest.mark.slow
def test_nothing_is_left_of_a_program_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM.format(guard='if __name__ == "__main__":'))
    program = subprocess.Popen([sys.executable, "train.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    hosts = [psutil.Process(int(pid)) for pid in program.stdout.readline().split()]
    assert len(hosts) == 2
    servers = {host.parent() for host in hosts}
    program.send_signal(signal.SIGKILL)
    program.communicate()
    assert psutil.wait_procs([*hosts, *filter(None, servers)], timeout=60)[1] == []


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"num_hosts": 0}, "num_hosts is 0, expected a whole number from 1 on"),
        ({"join_timeout": "long"}, "join_timeout is 'long', expected seconds"),
        ({"strategy": "near"}, "strategy is 'near', expected 'spread' or 'pack'"),
        ({"num_cpus": 0}, "a host's resources are {'CPU': 0, 'GPU': 0}, expected numbers from 0 on, and one above 0"),
        ({"address": "tcp://0.0.0.0:7010"}, "'tcp://0.0.0.0:7010', expected a 'tcp://host:port' that hosts can dial"),
        ({"address": "unix:/x"}, "address is 'unix:/x', expected a 'tcp://host:port' that hosts can dial"),
        ({"num_gpus": "1"}, "a host's resources are {'CPU': 1, 'GPU': '1'}, expected numbers from 0 on"),
        ({"resources": {"tpu": -1}}, "a host's resources are {'CPU': 1, 'GPU': 0, 'tpu': -1}, expected numbers"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], told: str) -> None:
    """Those of any hosts of one's own, and those of Ray."""
    for kind in (OnProcesses, OnRay) if options.keys() <= {"num_hosts", "join_timeout"} else (OnRay,):
        with pytest.raises(ValueError, match=re.escape(told)):
            kind(**options)


def test_a_missing_ray_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EnvError, match=r"OnRay takes the package ray: pip install 'rollflow\[ray\]'"):
        OnRay()


def unpicklable() -> Any:
    lock = threading.Lock()
    return lambda: lock


def ready() -> gym.vector.VectorEnv[Any, Any, Any]:
    return gym.make_vec("CartPole-v1", num_envs=1, vectorization_mode="sync")


@pytest.mark.parametrize(
    ("kind", "env", "options", "told"),
    [
        (Rollout, "CartPole-v1", {"module": NumberedModule()}, "module is a NumberedModule that is made already"),
        (Rollout, "CartPole-v1", {"module": torch.nn.Linear(4, 2)}, "module is a Linear that is made already"),
        (MultiAgentRollout, telling_agents, {"module": {"a": None, "b": NumberedModule()}}, r"module\['b'\] is a Numb"),
        (Rollout, unpicklable(), {}, "env can't be handed to hosts: .*lock.*; expected an id, or"),
        (Rollout, flat, {"env_to_module_connector": unpicklable()}, "env_to_module_connector can't be handed to hosts"),
        (Rollout, ready(), {}, "env is .*, made already, and hosts make their own; expected a callable"),
        (
            Rollout,
            gym.make("CartPole-v1"),
            {},
            "env is .*, made already, and hosts make their own; expected a callable",
        ),
        (
            Rollout,
            ["CartPole-v1", 5],
            {},
            r"env is \['CartPole-v1', 5\], but hosts make their own; expected a callable",
        ),
    ],
    ids=["module", "torch module", "modules", "env", "connector", "ready", "made", "number"],
)
def test_what_can_not_go_to_hosts_is_refused(kind: Any, env: Any, options: dict[str, Any], told: str) -> None:
    with pytest.raises((EnvError, ModuleError), match=told):
        kind(env, where=OnProcesses(), **options)
