"""CartPole with 64 slots, beside the engines that are installed here; those that are not are named.

python -m benchmarks.beside_peers [--quick]
"""

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.command import run
from benchmarks.envs import plain_cartpole
from benchmarks.loop import FRAGMENT_LENGTH
from benchmarks.pairs import Record, Sizes, paired
from benchmarks.policies import Mlp
from rollflow.nodes import Rollout

SLOTS = 64


def _stable_baselines3() -> Any:
    from benchmarks.peers.stable_baselines3 import Runner

    return Runner(plain_cartpole, SLOTS, FRAGMENT_LENGTH)


def _torch_rl() -> Any:
    from benchmarks.peers.torch_rl import Runner

    return Runner(plain_cartpole, SLOTS, FRAGMENT_LENGTH)


def _rllib() -> Any:
    from benchmarks.peers.rllib import Runner

    return Runner(SLOTS, FRAGMENT_LENGTH)


# Package, name, what makes its runner, the environment that ours is given.
PEERS: tuple[tuple[str, str, Callable[[], Any], Any], ...] = (
    ("stable_baselines3", "Stable-Baselines3", _stable_baselines3, plain_cartpole),
    ("torchrl", "TorchRL", _torch_rl, plain_cartpole),
    ("ray", "RLlib", _rllib, "CartPole-v1"),
)


def measure(sizes: Sizes) -> list[Record]:
    """A line for each engine that is installed."""
    lines = []
    for package, name, make, env in PEERS:
        if importlib.util.find_spec(package) is None:
            print(f"{name}: left out, it is not installed here", file=sys.stderr)
            continue
        lines.append(_measured(name, make(), env, sizes))
    return lines


def _measured(name: str, runner: Any, env: Any, sizes: Sizes) -> Record:
    with Rollout(env, module=Mlp(), num_envs=SLOTS, fragment_length=FRAGMENT_LENGTH, seed=0) as rollout:
        batches = iter(rollout.batches())
        told = {"beside_name": name}
        return paired(
            f"beside {name}", SLOTS, lambda: len(next(batches)["obs"]), runner.fragment, aim=1.0, sizes=sizes, **told
        )


if __name__ == "__main__":
    run(measure)
