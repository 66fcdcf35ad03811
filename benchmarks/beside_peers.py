"""Beside the engines that are installed here; those that are not are named.

CartPole on one core, and with TorchRL's collector of several processes, pixels and CartPole on two.

python -m benchmarks.beside_peers [--quick]
"""

import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.command import run
from benchmarks.envs import PLAIN_CARTPOLE, PixelEnv, plain_cartpole
from benchmarks.loop import FRAGMENT_LENGTH
from benchmarks.pairs import Record, Sizes, in_turns, paired, record
from benchmarks.policies import Mlp, NatureCnn
from benchmarks.two_cores import rollouts
from rollflow import Rollout


def _stable_baselines3(slots: int) -> Any:
    from benchmarks.peers.stable_baselines3 import Runner

    return Runner(plain_cartpole, slots, FRAGMENT_LENGTH)


def _puffer_lib(slots: int) -> Any:
    from benchmarks.peers.puffer_lib import Runner

    return Runner("CartPole-v1", slots, Mlp())


def _torch_rl(slots: int) -> Any:
    from benchmarks.peers.torch_rl import Runner

    return Runner(plain_cartpole, slots, FRAGMENT_LENGTH, policy=Mlp)


def _rllib(slots: int) -> Any:
    from benchmarks.peers.rllib import Runner

    return Runner(slots, FRAGMENT_LENGTH)


# Package, name, what makes its runner of so many slots, the environment that ours is given, slots.
PEERS: tuple[tuple[str, str, Callable[[int], Any], Any, tuple[int, ...]], ...] = (
    ("stable_baselines3", "Stable-Baselines3", _stable_baselines3, PLAIN_CARTPOLE, (8, 64, 256)),
    ("pufferlib", "PufferLib Serial", _puffer_lib, PLAIN_CARTPOLE, (8, 64, 256)),
    ("torchrl", "TorchRL", _torch_rl, PLAIN_CARTPOLE, (64,)),
    ("ray", "RLlib", _rllib, "CartPole-v1", (64,)),
)
TWO_CORES = (
    ("pixels beside TorchRL", PixelEnv, NatureCnn, 32),
    ("CartPole beside TorchRL", plain_cartpole, Mlp, 64),
)


def measure(sizes: Sizes) -> list[Record]:
    """A line for each engine that is installed."""
    lines = []
    for package, name, make, env, slots in PEERS:
        if importlib.util.find_spec(package) is None:
            print(f"{name}: left out, it is not installed here", file=sys.stderr)
            continue
        lines += [_measured(name, make(count), env, count, sizes) for count in slots]
    if importlib.util.find_spec("torchrl") is not None:
        lines += [_on_two_cores(sizes, *case) for case in TWO_CORES]
    return lines


def _measured(name: str, runner: Any, env: Any, slots: int, sizes: Sizes) -> Record:
    options: Any = {"num_envs": slots, "fragment_length": FRAGMENT_LENGTH, "seed": 0}
    with Rollout(env, module=Mlp(), **options) as rollout:
        batches = iter(rollout.batches())
        told = {"beside_name": name}
        return paired(
            f"beside {name}", slots, lambda: len(next(batches)["obs"]), runner.fragment, aim=1.0, sizes=sizes, **told
        )


def _on_two_cores(sizes: Sizes, workload: str, env: Any, policy: Any, slots: int) -> Record:
    from benchmarks.peers.torch_rl import in_processes

    seconds = max(2 * sizes.seconds, 1.0)

    ours = partial(rollouts, env, policy, slots, 2, seconds)
    theirs = partial(in_processes, env, slots, FRAGMENT_LENGTH, policy=policy, workers=2, seconds=seconds)
    told: dict[str, Any] = {"where": "rollouts", "workers": 2, "beside_name": "TorchRL MultiAsyncCollector"}
    return record(f"{workload}, two cores", slots, in_turns(ours, theirs, max(1, sizes.rounds // 3)), aim=1.0, **told)


if __name__ == "__main__":
    run(measure)
