"""Several agents: 64 environments with 8 agents each, which do nothing, with modules that do nothing and with two MLPs.

The loop beside them keeps `[environment, agent]` arrays, without a dict; half of the agents are one module's, half
another's, and every 128 steps it makes a flat batch for each. The same agents as dict environments stand beside RLlib's
`MultiAgentEnvRunner`, where Ray is installed. Steps are agent steps.

    python -m benchmarks.multi_agent [--quick]
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from benchmarks.command import run
from benchmarks.loop import FRAGMENT_LENGTH
from benchmarks.pairs import Record, Sizes, paired
from benchmarks.policies import Mlp, Noop, sampled
from rollflow import Forward, MultiAgentRollout, RLModule
from rollflow.nodes import ArrayStep, MultiAgentEnv, MultiAgentVectorEnv

ENVS, AGENTS = 64, tuple(f"agent_{number}" for number in range(8))
HALF = len(AGENTS) // 2
MODULE_OF = {agent: "left" if place < HALF else "right" for place, agent in enumerate(AGENTS)}
_SEEN, _DONE = gym.spaces.Box(-1, 1, (4,), np.float32), gym.spaces.Discrete(2)


class NoopAgents(MultiAgentVectorEnv):
    """Gives the same arrays at every step; no episode ever ends."""

    def __init__(self, num_envs: int = ENVS) -> None:
        self.num_envs, self.possible_agents = num_envs, AGENTS
        self.observation_spaces, self.action_spaces = dict.fromkeys(AGENTS, _SEEN), dict.fromkeys(AGENTS, _DONE)
        shape, nobody = (num_envs, len(AGENTS)), np.zeros(num_envs, np.bool_)
        self._answer = ArrayStep([np.zeros((*shape, 4), np.float32)], [np.zeros(shape, np.float32)], nobody, nobody)

    def reset_arrays(self, seeds: Sequence[int] | None) -> tuple[Any, Any]:
        return self._answer.observations, ()

    def step_arrays(self, actions: Any) -> ArrayStep:
        return self._answer


class NoopDicts(MultiAgentEnv):
    """The same with dicts; episodes of 200 steps."""

    def __init__(self, config: Any = None) -> None:
        self.possible_agents = self.agents = list(AGENTS)
        self.observation_spaces, self.action_spaces = dict.fromkeys(AGENTS, _SEEN), dict.fromkeys(AGENTS, _DONE)
        self._observations = {agent: np.zeros(4, np.float32) for agent in AGENTS}
        self._rewards = dict.fromkeys(AGENTS, 0.0)
        self._left = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._left = 200
        return self._observations, {}

    def step(self, actions: Any) -> Any:
        self._left -= 1
        ended = {"__all__": self._left <= 0}
        return self._observations, self._rewards, ended, {"__all__": False}, {}


class Loop:
    """The loop that somebody would write by hand."""

    def __init__(self, modules: Sequence[RLModule]) -> None:
        self._env, self._modules = NoopAgents(), modules
        shape = (FRAGMENT_LENGTH, ENVS, len(AGENTS))
        self._columns = {
            "obs": np.empty((*shape, 4), np.float32),
            "actions": np.empty(shape, np.int64),
            "rewards": np.empty(shape, np.float32),
            "values": np.empty(shape, np.float32),
            "logp": np.empty(shape, np.float32),
        }
        self._terminateds = np.empty(shape[:2], np.bool_)
        self._truncateds = np.empty(shape[:2], np.bool_)
        (self._last,), _ = self._env.reset_arrays(None)
        self.batches: list[dict[str, torch.Tensor]] = []

    def fragment(self) -> int:
        """One fragment and a batch for each module; how many agent steps it has."""
        obs, actions, rewards, values, logps = self._columns.values()
        halves = slice(0, HALF), slice(HALF, None)
        observations = self._last
        with torch.no_grad():
            for t in range(FRAGMENT_LENGTH):
                obs[t] = observations
                for half, module in zip(halves, self._modules, strict=True):
                    output = module._forward({"obs": torch.from_numpy(obs[t, :, half]).reshape(-1, 4)})
                    if "actions" in output:
                        chosen, logp = output["actions"], output["vf_preds"]
                    else:
                        chosen, logp = sampled(output["action_dist_inputs"])
                    actions[t, :, half] = chosen.numpy().reshape(ENVS, HALF)
                    logps[t, :, half] = logp.numpy().reshape(ENVS, HALF)
                    values[t, :, half] = output["vf_preds"].numpy().reshape(ENVS, HALF)
                told = self._env.step_arrays([actions[t]])
                (observations,), (rewards[t],) = told.observations, told.rewards
                self._terminateds[t], self._truncateds[t] = told.terminateds, told.truncateds
        self._last = observations
        self.batches = [
            {name: torch.from_numpy(_flat(column[:, :, half])) for name, column in self._columns.items()}
            for half in halves
        ]
        return actions.size


def measure(sizes: Sizes) -> list[Record]:
    """A line for each kind of module, and one beside RLlib where that is installed."""
    idle: Callable[[], RLModule] = lambda: Noop(ENVS * HALF)  # noqa: E731
    records = [_beside_loop(name, make, sizes) for name, make in (("no-op modules", idle), ("two MLPs", Mlp))]
    if importlib.util.find_spec("ray") is None:
        print("several agents beside RLlib: left out, Ray is not installed here", file=sys.stderr)
        return records
    return [*records, _beside_rllib(sizes)]


def _rollout(env: Any, make: Callable[[], RLModule], **options: Any) -> MultiAgentRollout:
    return MultiAgentRollout(
        env,
        module={"left": make(), "right": make()},
        agent_to_module_mapping_fn=MODULE_OF,
        fragment_length=FRAGMENT_LENGTH,
        seed=0,
        forward=Forward(flat=make is Mlp),
        **options,
    )


def _beside_loop(name: str, make: Callable[[], RLModule], sizes: Sizes) -> Record:
    loop = Loop([make(), make()])
    with _rollout(NoopAgents(), make) as rollout:
        batches = iter(rollout.batches())
        return paired(
            f"several agents, {name}", ENVS, lambda: _count(next(batches)), loop.fragment, aim=None, sizes=sizes
        )


def _beside_rllib(sizes: Sizes) -> Record:
    from benchmarks.peers.rllib_agents import Runner

    runner = Runner(NoopDicts, ENVS, FRAGMENT_LENGTH, MODULE_OF)
    with _rollout(NoopDicts, Mlp, num_envs=ENVS) as rollout:
        batches = iter(rollout.batches())
        told = {"beside_name": "RLlib's MultiAgentEnvRunner"}
        return paired(
            "several agents, dicts", ENVS, lambda: _count(next(batches)), runner.fragment, aim=3.0, sizes=sizes, **told
        )


def _count(batches: dict[str, Any]) -> int:
    return sum(len(batch["obs"]) for batch in batches.values())


def _flat(rows: Any) -> Any:
    return np.ascontiguousarray(np.moveaxis(rows, 0, 2)).reshape(-1, *rows.shape[3:])


if __name__ == "__main__":
    run(measure)
