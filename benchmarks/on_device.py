"""Rollouts on tensors beside a loop by hand that records the same columns, and beside rsl_rl's own collection.

On a GPU if there is one. rsl_rl and gymnax are left out, and named, where they are not installed.

With `--check` nothing is measured: vector steps are held to wait for nothing, and fragments against those of arrays, in
less than two minutes. On the CPU, where nothing waits, reads are counted.

    python -m benchmarks.on_device [--quick]
    python -m benchmarks.on_device --check [--device cpu]
"""

import argparse
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from benchmarks.command import run
from benchmarks.host_reads import counting_reads
from benchmarks.pairs import Record, Sizes, paired
from benchmarks.policies import Mlp, sampled
from benchmarks.sources import SmallMlp, gaussian
from examples.on_device import DEVICE, TorchCartPole
from rollflow import JaxEnvs, Rollout, TorchEnvs
from rollflow.nodes import LambdaConnector
from rollflow.nodes.connectors.pipelines.default_pipelines import LearnerConnectorPipeline
from rollflow.nodes.device.environments import DeviceEnvironments
from rollflow.nodes.stages.acting import acting_for
from rollflow.stream.data.tree import leaves_of

FRAGMENT_LENGTH = 32
SLOTS = 4096, 16384


class TensorLoop:
    """Steps, passes forward without gradients, samples, writes everything into preallocated columns on the device.

    Makes one flat batch of tensors, slot by slot, every 32 steps.
    """

    def __init__(self, env: Any, policy: Any, observations: torch.Tensor) -> None:
        self._env, self._policy, self._last = env, policy, observations
        self._sampled = gaussian if isinstance(policy, SmallMlp) else sampled
        with torch.no_grad():
            values = self._acted(observations)
        self._columns: dict[str, torch.Tensor] = {
            name: torch.empty((FRAGMENT_LENGTH, *value.shape), dtype=value.dtype, device=value.device)
            for name, value in ({"obs": observations, "rewards": values["values"]} | values).items()
        }
        flags = torch.empty((FRAGMENT_LENGTH, len(observations)), dtype=torch.bool, device=observations.device)
        self._columns |= {"terminateds": flags, "truncateds": flags.clone()}
        self.batch: dict[str, torch.Tensor] = {}

    def fragment(self) -> int:
        """One fragment and its batch; how many steps it has."""
        columns, observations = self._columns, self._last
        with torch.no_grad():
            for t in range(FRAGMENT_LENGTH):
                columns["obs"][t] = observations
                acted = self._acted(columns["obs"][t])
                for name, value in acted.items():
                    columns[name][t] = value
                observations, columns["rewards"][t], ends, *truncated, extras = self._env.step(acted["actions"])
                cut = truncated[0] if truncated else extras["time_outs"]
                columns["terminateds"][t] = ends if truncated else ends.bool() & ~cut
                columns["truncateds"][t] = cut
        self._last = observations
        self.batch = {name: column.transpose(0, 1).flatten(0, 1) for name, column in columns.items()}
        return FRAGMENT_LENGTH * self._env.num_envs

    def _acted(self, observations: torch.Tensor) -> dict[str, torch.Tensor]:
        output = self._policy._forward({"obs": observations})
        actions, logp = self._sampled(output["action_dist_inputs"])
        return {"actions": actions, "logp": logp, "inputs": output["action_dist_inputs"], "values": output["vf_preds"]}


class RslCartPole:
    """The CartPole as rsl_rl's `VecEnv`: pushed by the sign of one number."""

    num_actions, max_episode_length, cfg = 1, 500, None

    def __init__(self, num_envs: int, device: Any) -> None:
        self.num_envs, self.device = num_envs, torch.device(device)
        self._env = TorchCartPole(num_envs, device)
        self._obs = self._env.reset()
        self.episode_length_buf = torch.zeros(num_envs, dtype=torch.int64, device=device)

    def get_observations(self) -> Any:
        return self._obs

    def step(self, actions: torch.Tensor) -> tuple[Any, ...]:
        self._obs, rewards, terminated, truncated, _ = self._env.step(actions[:, 0] > 0)
        return self.get_observations(), rewards, (terminated | truncated).long(), {"time_outs": truncated}


class RslCollection:
    """The collection of rsl_rl's `OnPolicyRunner.learn`, without its update."""

    def __init__(self, slots: int) -> None:
        from rsl_rl.runners import OnPolicyRunner
        from tensordict import TensorDict

        class Env(RslCartPole):
            def get_observations(self) -> Any:
                return TensorDict({"policy": self._obs}, batch_size=[self.num_envs])

        layers = {"hidden_dims": [64], "activation": "tanh"}
        gaussians = {"class_name": "GaussianDistribution", "init_std": 1.0}
        config = {
            "num_steps_per_env": FRAGMENT_LENGTH,
            "save_interval": 1 << 30,
            "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
            "actor": {"class_name": "MLPModel", "distribution_cfg": gaussians, **layers},
            "critic": {"class_name": "MLPModel", **layers},
            "algorithm": {"class_name": "PPO"},
        }
        self._env = Env(slots, DEVICE)
        self._algorithm = OnPolicyRunner(self._env, config, None, DEVICE).alg
        self._obs = self._env.get_observations()

    def fragment(self) -> int:
        """One fragment, without returns and advantages; how many steps it has."""
        with torch.inference_mode():
            for _ in range(FRAGMENT_LENGTH):
                actions = self._algorithm.act(self._obs)
                self._obs, rewards, dones, extras = self._env.step(actions)
                self._algorithm.process_env_step(self._obs, rewards, dones, extras)
        self._algorithm.storage.clear()
        return FRAGMENT_LENGTH * self._env.num_envs


def measure(sizes: Sizes, slots: tuple[int, ...] = SLOTS) -> list[Record]:
    """Two lines for each number of slots, and one more for each of rsl_rl and gymnax that is installed."""
    lines = []
    has_rsl_rl, has_gymnax = (importlib.util.find_spec(name) is not None for name in ("rsl_rl", "gymnax"))
    if not has_rsl_rl:
        print("rsl_rl: left out, rsl-rl-lib is not installed here", file=sys.stderr)
    if not has_gymnax:
        print("gymnax: left out, it is not installed here", file=sys.stderr)
    for count in slots:
        env, push = TorchCartPole(count, DEVICE), RslCartPole(count, DEVICE)
        discrete, gaussian_loop = Mlp().to(DEVICE), _small_mlp()
        lines.append(_measured("CartPole of tensors", count, TensorLoop(env, discrete, env.reset()), sizes, 0.97))
        loop = TensorLoop(push, gaussian_loop, push.get_observations())
        lines.append(_measured("CartPole as rsl_rl has it", count, loop, sizes, 0.97, is_rsl=True))
        if has_rsl_rl:
            lines.append(_measured("beside rsl_rl", count, RslCollection(count), sizes, 1.0, is_rsl=True))
        if has_gymnax:
            slots_in_jax, source = (_jax_cart_pole(count) for _ in range(2))
            loop = TensorLoop(slots_in_jax.env, discrete, slots_in_jax.env.reset(seed=0))
            lines.append(_measured("CartPole in JAX", count, loop, sizes, 0.9, source=source))
    return lines


def _jax_cart_pole(slots: int) -> JaxEnvs:
    return JaxEnvs(*importlib.import_module("gymnax").make("CartPole-v1"), num_envs=slots)


def _small_mlp() -> SmallMlp:
    numbers = [spaces.Box(-np.inf, np.inf, (size,), np.float32) for size in (4, 1)]
    return SmallMlp(*numbers).to(DEVICE)


def _measured(
    name: str, slots: int, beside: Any, sizes: Sizes, aim: float, *, is_rsl: bool = False, source: Any = None
) -> Record:
    env: Any = RslCartPole(slots, DEVICE) if is_rsl else TorchCartPole(slots, DEVICE)
    module: Any = _small_mlp() if is_rsl else Mlp().to(DEVICE)
    source = source or TorchEnvs(env)
    with Rollout(source, module=module, fragment_length=FRAGMENT_LENGTH, seed=0) as rollout:
        batches = iter(rollout.batches())
        return paired(name, slots, lambda: len(next(batches)["obs"]), beside.fragment, aim=aim, sizes=sizes)


def check(device: str, slots: int = 64, rows: int = 32) -> bool:
    """Print what holds on a device, and what does not; True if all of it does."""
    fine = True
    for name, make in {"CartPole of tensors": TorchCartPole, "CartPole as rsl_rl has it": RslCartPole}.items():
        for use_lstm in (False, True):
            config = {"use_lstm": use_lstm, "lstm_cell_size": 16, "fcnet_hiddens": [32]}
            in_steps, afterwards = _waits_of(make(slots, device), config, rows)
            values, others = _differences(make, device, config, slots, rows)
            fine = fine and not in_steps and not others
            print(
                f"{name}{', LSTM' if use_lstm else ''}: {in_steps} waits in {rows} vector steps (expected 0), "
                f"{afterwards} at the cut and in its batch; {others} of {values} values differ from those of arrays"
            )
    print(f"{device}: {'all holds' if fine else 'FAILED'}")
    return fine


@contextmanager
def _waits(device: str) -> Iterator[list[Any]]:
    """What has waited for a device."""
    if not device.startswith("cuda"):
        with counting_reads() as reads:
            yield reads
        return
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield told
        finally:
            torch.cuda.set_sync_debug_mode("default")


def _waits_of(env: Any, config: Any, rows: int) -> tuple[int, int]:
    """Waits in the vector steps of a fragment, and those at its cut and in its batch."""
    environments = DeviceEnvironments(TorchEnvs(env), fragment_length=3 * rows)
    spaces = environments.observation_space, environments.action_space
    connectors = dict.fromkeys(("env_to_module_connector", "module_to_env_connector"))
    device = environments.device
    acting = acting_for(env, spaces, module=None, model_config=config, seed=0, device=device, **connectors)
    acting.make_lanes(environments, 1, 0)
    prepare, forward, act = acting.stages(environments, {"explore": True, "threads": None}, None)
    learner = LearnerConnectorPipeline.default(*spaces, stateful=config["use_lstm"], device=device)
    (lane,) = environments.start()

    def steps(count: int) -> None:
        for _ in range(count):
            environments(act(forward(prepare(lane).batches)))

    steps(rows)
    with _waits(str(device)) as in_steps:
        steps(rows)
    with _waits(str(device)) as afterwards:
        learner.of_fragments([prepare.cut(lane)], acting.copy)
    return len(in_steps), len(afterwards)


def _differences(make: Any, device: str, config: Any, slots: int, rows: int) -> tuple[int, int]:
    """How many values the fragments of a rollout on a device have, and how many differ from those of arrays."""

    def made(**more: Any) -> list[Any]:
        options: dict[str, Any] = {"model_config": config, "explore": False, "seed": 0, **more}
        env = TorchEnvs(make(slots, device), allow_host_copies=True)
        with Rollout(env, fragment_length=rows, num_fragments=3, **options) as rollout:
            return [fragment.host for fragment in rollout.fragments()]

    def of_arrays(env: Any) -> Any:
        return LambdaConnector(lambda batch: None, columnar=True, changes_episodes=False)

    values = differ = 0
    for ours, others in zip(made(), made(env_to_module_connector=of_arrays), strict=True):
        for name in others.columns:
            for one, other in zip(leaves_of(ours.column(name)), leaves_of(others.column(name)), strict=True):
                values += one.size
                differ += int((~np.isclose(one, other, rtol=1e-4, atol=1e-4)).sum())
    return values, differ


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--device", default=DEVICE)
    options, _ = parser.parse_known_args()
    if options.check:
        sys.exit(not check(options.device))
    run(measure)
