"""Hosts that Ray places: a rollout over them loses no more than it says, and leaves nothing behind."""

import importlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
import torch.distributed as dist
from ending_agent_envs import logs_of
from held_envs import LONGEST_S, await_that
from lost_agents import not_emitted
from numbered_module import NumberedModule
from ray import tune
from ray.cluster_utils import Cluster
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from remote_rollouts import check_counts, check_laws, taken_until
from small_program import call_of
from started_hosts import LOG_VARIABLE, check_only_unfinished, missing_steps, pids_of, telling_agents, telling_env

from rollflow import MultiAgentRollout, Rollout
from rollflow.nodes import OnRay
from rollflow.nodes.launch.ray_launcher import RayHost, RayLauncher
from rollflow.stream import EnvError

STRIKES = int(os.environ.get("STRIKES", "2"))  # how often hosts are struck; twice at least


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster of three nodes with room for two hosts on each, and a head without room."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(3):
        made.add_node(num_cpus=2)
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


def on_ray(folder: Path, **options: Any) -> OnRay:
    variables = {LOG_VARIABLE: str(folder), "PYTHONPATH": os.pathsep.join(sys.path)}
    return OnRay(runtime_env={"env_vars": variables}, **options)


def all_free() -> bool:
    return ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"]


def actors_of(rollout: Rollout) -> dict[int, psutil.Process]:
    """The actor of each host, by the host's process."""
    hosts = rollout.environments._supply._hosts

    def pids(host: RayHost) -> tuple[int, int]:
        assert host._program is not None
        return host._program._worker.pid, os.getpid()

    told = ray.get([each.program._actor.__ray_call__.remote(pids) for each in hosts], timeout=LONGEST_S)
    return {host: psutil.Process(actor) for host, actor in told}


def hosts_on(raylet: int, actors: dict[int, psutil.Process]) -> set[int]:
    """The hosts whose actors are on the node with this raylet."""
    return {host for host, actor in actors.items() if actor.ppid() == raylet}


def kill_actor(cluster: Cluster, actor: psutil.Process) -> None:
    actor.kill()


def kill_node(cluster: Cluster, actor: psutil.Process) -> None:
    """Kill the node that an actor is on, and add another."""
    raylet = actor.ppid()
    [node] = [each for each in cluster.worker_nodes if each.all_processes["raylet"][0].process.pid == raylet]
    cluster.remove_node(node, allow_graceful=False)
    cluster.add_node(num_cpus=2)


def test_hosts_that_are_struck_come_back_as_others_and_lose_what_is_counted(cluster: Cluster, tmp_path: Path) -> None:
    rng, victims = random.Random(0), set[int]()
    options: Any = {"module": NumberedModule, "fragment_length": 8, "seed": 0, "prefetch": 1}
    with Rollout(telling_env, num_envs=2, where=on_ray(tmp_path, num_hosts=3), **options) as rollout:
        fragments = rollout.fragments()
        taken = taken_until(fragments, lambda taken: len(pids_of(taken)) == 3)
        for strike in [kill_actor, kill_node, *rng.choices([kill_actor, kill_node], k=STRIKES - 2)]:
            victim = rng.choice(sorted(pids_of(taken) - victims))
            actors = actors_of(rollout)
            lost_with_it = hosts_on(actors[victim].ppid(), actors)
            strike(cluster, actors[victim])
            victims |= {victim} if strike is kill_actor else lost_with_it
            known = pids_of(taken)
            count = len(known - victims)
            taken += taken_until(fragments, lambda more: len(pids_of(more) - known) == 3 - count)  # noqa: B023
        taken += taken_until(fragments, lambda later: pids_of(later) >= pids_of(taken) - victims)
        rollout.drain()
        taken += list(fragments)
        assert not any(map(psutil.pid_exists, victims))
    check_laws(taken, rollout.lost, slots_lost=len(victims) * 2 * 8 * 2)
    check_counts(taken, rollout)
    check_only_unfinished(missing_steps(taken, tmp_path), victims, fragment_length=8)
    assert rollout.lost.keys() == {"workers"}
    await_that(all_free)


def run_trial(config: dict[str, Any]) -> None:
    """A trial whose rollout has a host of its own."""
    options: Any = {"module": NumberedModule, "fragment_length": 8, "num_fragments": 3}
    place = on_ray(Path(config["folder"]), num_hosts=1, num_cpus=0.5)
    with Rollout(telling_env, num_envs=2, where=place, seed=config["seed"], **options) as rollout:
        steps = sum(fragment.num_steps for fragment in rollout.fragments())
    tune.report({"steps": steps, "lost": sum(rollout.lost.values()), "made": rollout.num_steps})


def test_trials_of_tune_have_hosts_of_their_own(cluster: Cluster, tmp_path: Path) -> None:
    path = list(sys.path)

    def trial(config: dict[str, Any]) -> None:
        sys.path[:] = path
        importlib.import_module("test_on_ray").run_trial(config)

    space = {"seed": tune.grid_search([0, 1]), "folder": str(tmp_path / "log")}
    (tmp_path / "log").mkdir()
    tuner = tune.Tuner(
        tune.with_resources(trial, {"cpu": 0.5}),
        param_space=space,
        run_config=tune.RunConfig(storage_path=str(tmp_path), verbose=0),
    )
    results = tuner.fit()
    assert [result.error for result in results] == [None] * 2
    for metrics in [result.metrics for result in results]:
        assert metrics is not None
        assert metrics["steps"] == metrics["made"] > 0
        assert metrics["lost"] == 0
    await_that(all_free)


def train_rank(config: dict[str, Any]) -> None:
    """A worker of Ray Train, whose rollout has a host of its own."""
    rank = ray.train.get_context().get_world_rank()
    place = on_ray(Path(config["folder"]), num_hosts=1, num_cpus=0.5)
    options: Any = {"module": NumberedModule, "fragment_length": 8, "num_fragments": 4, "seed": rank}
    with Rollout(telling_env, num_envs=2, where=place, **options) as rollout:
        weight, optimizer = rollout.module.weight, torch.optim.SGD(rollout.module.parameters(), lr=1.0)
        weight.data.fill_(rank + 5.0)
        dist.broadcast(weight.data, src=0)
        rollout.publish(rollout.module.state_dict())
        used = []
        for batch in rollout.batches():
            used.append(batch["weight"].unique().tolist())
            weight.grad = torch.tensor(1.0 + rank)
            dist.all_reduce(weight.grad)
            optimizer.step()
            rollout.publish(rollout.module.state_dict())
    (Path(config["folder"]) / f"rank {rank}").write_text(json.dumps([used, rollout.num_steps, rollout.lost]))


def test_a_host_that_is_told_to_end_loses_nothing_and_comes_back_as_another(cluster: Cluster, tmp_path: Path) -> None:
    options: Any = {"module": NumberedModule, "fragment_length": 8, "seed": 0, "prefetch": 1}
    with Rollout(telling_env, num_envs=2, where=on_ray(tmp_path, num_hosts=2), **options) as rollout:
        fragments = rollout.fragments()
        taken = taken_until(fragments, lambda taken: len(pids_of(taken)) == 2)
        [leaving, other] = pids_of(taken)
        os.kill(leaving, signal.SIGTERM)
        taken += taken_until(fragments, lambda more: len(pids_of(more) - {leaving, other}) == 1)
        rollout.drain()
        taken += list(fragments)
    check_counts(taken, rollout)
    assert (missing_steps(taken, tmp_path), rollout.lost) == ({}, {})
    await_that(all_free)


def test_every_step_of_several_agents_comes_once_and_none_through_rays_store(cluster: Cluster, tmp_path: Path) -> None:
    free = ray.available_resources()["object_store_memory"]
    assert free == ray.cluster_resources()["object_store_memory"]
    options: Any = {"module": {"agent 0": NumberedModule, "default_policy": NumberedModule}, "fragment_length": 8}
    place, taken = on_ray(tmp_path, num_hosts=2, strategy="pack"), []
    with MultiAgentRollout(telling_agents, num_envs=2, where=place, num_fragments=3, seed=0, **options) as rollout:
        for fragment in rollout.fragments():
            taken.append(fragment)
            rollout.publish({module_id: module.state_dict() for module_id, module in rollout.module.items()})
        assert ray.available_resources()["object_store_memory"] == free
    slots = [int(path.name.removeprefix("pid ")) for path in tmp_path.glob("pid *")]
    assert len(slots) == 4
    assert not_emitted(taken, [log for slot in slots for log in logs_of(tmp_path, slot)]) == 0
    assert rollout.lost == {}
    await_that(all_free)


def test_a_cluster_without_room_says_what_is_waited_for(cluster: Cluster, tmp_path: Path) -> None:
    told = r"0 of 2 hosts came within 2 s, .*waits for room in Ray's cluster: 2 hosts take \{'CPU': 5\} each, spread; "
    with pytest.raises(EnvError, match=told):
        Rollout(telling_env, where=on_ray(tmp_path, num_hosts=2, num_cpus=5, join_timeout=2.0), module=NumberedModule)
    await_that(all_free)


def test_hosts_whose_environment_can_not_be_made_say_so(cluster: Cluster) -> None:
    with pytest.raises(EnvError, match=r"hosts fail again and again: host ray-0 exited with code 1: .*Nope-v0"):
        Rollout("Nope-v0", where=OnRay(num_hosts=1))
    await_that(all_free)


def test_the_programs_of_a_launcher_are_what_they_are_as_processes(cluster: Cluster) -> None:
    variables = {"PYTHONPATH": os.pathsep.join(sys.path)}
    launcher = RayLauncher(2, "spread", {"CPU": 1}, {"env_vars": variables})
    first, other = (launcher.run(number, call_of("wait")) for number in range(2))
    await_that(lambda: first.log.endswith("waits\n"))
    assert first.log.startswith("['wait'] ray-0\n")
    assert (first.end, other.end, launcher.waits([0, 1])) == (None, None, "")
    first.kill()
    await_that(lambda: first.end is not None)
    again = launcher.run(0, call_of("end", "7"))
    await_that(lambda: again.end is not None)
    assert (again.end, again.log) == ("", "['end', '7'] ray-0\n")
    launcher.stop([again, other])
    await_that(lambda: other.end is not None)
    await_that(all_free)


PROGRAM = """
import sys
import ray
from numbered_module import NumberedModule
from test_on_ray import actors_of, on_ray
from started_hosts import pids_of, telling_env
from rollflow import Rollout

ray.init(address=sys.argv[1], log_to_driver=False)
with Rollout(telling_env, where=on_ray(sys.argv[2], num_hosts=2), module=NumberedModule, fragment_length=8) as rollout:
    pids = set()
    for fragment in rollout.fragments():
        if len(pids | pids_of([fragment])) > len(pids):
            pids |= pids_of([fragment])
            print(*pids, flush=True)
        if len(pids) == 2:
            print(*(actor.pid for actor in actors_of(rollout).values()), flush=True)
"""


def test_nothing_is_left_of_a_program_that_is_killed(cluster: Cluster, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = [sys.executable, "-c", PROGRAM, cluster.address, str(tmp_path)]
    program = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=env)
    assert program.stdout is not None
    while len(hosts := program.stdout.readline().split()) < 2:
        assert program.poll() is None
    started = [psutil.Process(int(pid)) for pid in hosts]
    actors = [psutil.Process(int(pid)) for pid in program.stdout.readline().split()]
    servers = {process.parent() for process in started}
    program.send_signal(signal.SIGKILL)
    program.communicate()
    _, left = psutil.wait_procs([*started, *actors, *filter(None, servers)], timeout=LONGEST_S)
    assert left == []
    await_that(all_free)


def test_workers_of_ray_train_have_hosts_of_their_own_and_the_same_weights(cluster: Cluster, tmp_path: Path) -> None:
    path = list(sys.path)

    def train(config: dict[str, Any]) -> None:
        sys.path[:] = path
        importlib.import_module("test_on_ray").train_rank(config)

    (tmp_path / "log").mkdir()
    TorchTrainer(
        train,
        train_loop_config={"folder": str(tmp_path / "log")},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(storage_path=str(tmp_path)),
    ).fit()
    ranks = [json.loads((tmp_path / "log" / f"rank {rank}").read_text()) for rank in range(2)]
    assert ranks == [[[[5.0], [2.0], [-1.0], [-4.0]], 4 * 8 * 2, {}]] * 2
    await_that(all_free)  # Ray Train leaves something of its own in the store: nothing that looks there may follow
