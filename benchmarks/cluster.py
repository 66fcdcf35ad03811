"""Hosts that a rollout starts, as processes of this machine and by Ray, beside the same hosts by hand and RLlib's.

Each has whole rollouts of vectorized CartPole, and the hosts by hand are the command `rollflow rollout-host`. The rate
is that of train batches once all hosts are at work; a start is from the call of `Rollout` until all have joined. Ray
runs here, with two nodes that have a core each; without it, its lines are left out. RLlib's are an `EnvRunnerGroup` of
as many runners, which hand over episodes and not train batches. Starts of many hosts by Ray stand beside those of as
many actors that do nothing.

    python -m benchmarks.cluster [--quick]
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from time import perf_counter
from typing import Any

from benchmarks.command import run
from benchmarks.loop import FRAGMENT_LENGTH
from benchmarks.pairs import Record, Sizes, in_steady_state, in_turns, record, steps_per_s
from rollflow import RemoteRollouts, Rollout
from rollflow.nodes import OnProcesses, OnRay

HOSTS, SLOTS = 2, 32
_STARTED, _STARTS = 32, 3  # hosts; pairs

Opened = Callable[[], Any]  # gives a context manager of a rollout over the hosts


def measure(sizes: Sizes, hosts: int = HOSTS, slots: int = SLOTS) -> list[Record]:
    """A line for the rate and one for the start, of each place."""
    by_hand = partial(_by_hand, hosts, slots)
    lines = _beside("processes", partial(_started, OnProcesses(num_hosts=hosts), slots), by_hand, hosts * slots, sizes)
    if importlib.util.find_spec("ray") is None:
        print("Ray: left out, it is not installed here", file=sys.stderr)
        return lines
    with _cluster(hosts):
        on_ray = partial(_started, OnRay(num_hosts=hosts), slots)
        lines += _beside("Ray", on_ray, by_hand, hosts * slots, sizes)
        return [*lines, _beside_rllib(on_ray, hosts, slots, sizes), _beside_actors()]


def _beside_actors() -> Record:
    import ray

    class Bare:
        def answer(self) -> None:
            """Be there."""

    share = HOSTS / _STARTED

    def ours() -> float:
        began = perf_counter()
        with _started(OnRay(num_hosts=_STARTED, num_cpus=share, join_timeout=None), slots=1):
            return 1 / (perf_counter() - began)

    def theirs() -> float:
        began = perf_counter()
        actors = [ray.remote(Bare).options(num_cpus=share).remote() for _ in range(_STARTED)]
        ray.get([actor.answer.remote() for actor in actors])
        took_s = perf_counter() - began
        for actor in actors:
            ray.kill(actor)
        return 1 / took_s

    pairs = _thousandfold(in_turns(ours, theirs, _STARTS))
    told: dict[str, Any] = {"where": "Ray", "beside_name": "as many actors that do nothing"}
    return record("starts of many hosts by Ray (per 1,000 s)", _STARTED, pairs, aim=round(1 / 1.5, 2), **told)


def _beside_rllib(on_ray: Opened, hosts: int, slots: int, sizes: Sizes) -> Record:
    from benchmarks.peers.rllib import Group

    seconds = max(1.0, sizes.seconds)

    def ours() -> float:
        with on_ray() as rollout:
            return in_steady_state(rollout, seconds)

    def theirs() -> float:
        with closing(Group(hosts, slots, FRAGMENT_LENGTH)) as group:
            steps_per_s(group.fragments, seconds / 2)  # warm up
            return steps_per_s(group.fragments, seconds)

    told: dict[str, Any] = {"where": "Ray", "beside_name": "RLlib EnvRunnerGroup"}
    pairs = in_turns(ours, theirs, sizes.rounds)
    return record("hosts by Ray beside RLlib's runners", hosts * slots, pairs, aim=5.0, **told)


def _beside(place: str, ours: Opened, by_hand: Opened, slots: int, sizes: Sizes) -> list[Record]:
    seconds = max(1.0, sizes.seconds)
    starts: dict[Opened, list[float]] = {ours: [], by_hand: []}

    def rate(opened: Opened) -> float:
        began = perf_counter()
        with opened() as rollout:
            starts[opened].append(1 / (perf_counter() - began))
            return in_steady_state(rollout, seconds)

    pairs = in_turns(partial(rate, ours), partial(rate, by_hand), sizes.rounds)
    told: dict[str, Any] = {"where": place, "beside_name": "the same hosts started by hand"}
    started = list(zip(starts[ours], starts[by_hand], strict=True))
    return [
        record(f"whole rollouts on hosts by {place}", slots, pairs, aim=0.97, **told),
        record(f"starts of hosts by {place} (per 1,000 s)", slots, _thousandfold(started), aim=None, **told),
    ]


def _thousandfold(pairs: list[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(1000 * mine, 1000 * other) for mine, other in pairs]


def _started(place: OnProcesses | OnRay, slots: int) -> Rollout:
    return Rollout("CartPole-v1", num_envs=slots, where=place, fragment_length=FRAGMENT_LENGTH, prefetch=1, seed=0)


@contextmanager
def _by_hand(hosts: int, slots: int) -> Iterator[Rollout]:
    rollouts = RemoteRollouts.listen("tcp://127.0.0.1:0", hosts=hosts)
    command = [sys.executable, "-m", "rollflow.cli.main", "rollout-host", "--env", "CartPole-v1"]
    command += ["--num-envs", str(slots), "--connect", str(rollouts.addresses[0])]
    options: Any = {"env": {**os.environ, "OMP_NUM_THREADS": "1"}, "stderr": subprocess.DEVNULL}
    started = [subprocess.Popen(command, **options) for _ in range(hosts)]
    try:
        with Rollout(rollouts, fragment_length=FRAGMENT_LENGTH, prefetch=1, seed=0) as rollout:
            yield rollout
    finally:
        for process in started:
            process.wait()


@contextmanager
def _cluster(nodes: int) -> Iterator[None]:
    """A cluster of so many nodes with a core each, beside a head without any."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(nodes):
        cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    run(measure)
