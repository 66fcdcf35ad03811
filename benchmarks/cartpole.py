"""CartPole-v1 with a small network, beside the loop that somebody would write by hand.

The loop steps the environments, passes their observations forward without gradients, samples, writes everything into
preallocated columns, and makes one flat batch of tensors every 128 steps. A rollflow run gives the same batch, with
true episodes, log-probabilities, values and counters, through the default pipelines, its forward passes flat.
Environments are gymnasium's vectorized CartPole, or plain ones, which the loop steps by `SyncVectorEnv`. Prints one
JSON line for each number of slots, and a table.

    python -m benchmarks.cartpole [--quick]
"""

import sys
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from torch import nn

from benchmarks.pairs import paired, show
from rollflow.nodes import RLModule, Rollout

FRAGMENT_LENGTH = 128
VECTORIZED, PLAIN = (64, 256, 1024), (1, 8, 64, 256)
AIMS = {"vectorized": 1.0, "plain": 1.05, "one slot": 0.9}


class Policy(RLModule):
    """Two layers of 64, for two actions and a value."""

    def setup(self) -> None:
        self.trunk = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.logits, self.value = nn.Linear(64, 2), nn.Linear(64, 1)

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        hidden = self.trunk(batch["obs"])
        return {"action_dist_inputs": self.logits(hidden), "vf_preds": self.value(hidden).squeeze(-1)}


def sampled(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Actions and their log-probabilities, by a race of exponentials: the fastest way in torch."""
    log_probs = torch.log_softmax(logits, -1)
    actions = (log_probs.exp() / torch.empty_like(log_probs).exponential_()).argmax(-1)
    return actions, log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)


class Loop:
    """The loop written by hand."""

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        self._env, self._policy = env, Policy()
        # In gymnasium's NEXT_STEP mode the step after an end only resets.
        self._resets_next_step = env.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
        shape = (FRAGMENT_LENGTH, env.num_envs)
        self._columns = {
            "obs": np.empty((*shape, 4), np.float32),
            "actions": np.empty(shape, np.int64),
            "rewards": np.empty(shape, np.float32),
            "terminateds": np.empty(shape, np.bool_),
            "truncateds": np.empty(shape, np.bool_),
            "logp": np.empty(shape, np.float32),
            "values": np.empty(shape, np.float32),
        }
        self._valid = np.ones(shape, np.bool_)
        self._done = np.zeros(env.num_envs, np.bool_)
        self._last, _ = env.reset(seed=0)
        self.batch: dict[str, torch.Tensor] = {}

    def fragment(self) -> int:
        """One fragment and its batch."""
        obs, actions, rewards, terminateds, truncateds, logps, values = self._columns.values()
        observations = self._last
        with torch.no_grad():
            for t in range(FRAGMENT_LENGTH):
                obs[t] = observations
                output = self._policy._forward({"obs": torch.from_numpy(obs[t])})
                chosen, logp = sampled(output["action_dist_inputs"])
                actions[t] = acted = chosen.numpy()
                observations, rewards[t], terminateds[t], truncateds[t], _ = self._env.step(acted)
                logps[t], values[t] = logp.numpy(), output["vf_preds"].numpy()
                if self._resets_next_step:
                    self._valid[t] = ~self._done
                    self._done = terminateds[t] | truncateds[t]
        self._last = observations
        self.batch = {
            name: torch.from_numpy(np.ascontiguousarray(column.swapaxes(0, 1))).flatten(0, 1)
            for name, column in self._columns.items()
        }
        return int(self._valid.sum())


def measure(kind: str, slots: int, *, rounds: int, at_least_s: float) -> dict[str, Any]:
    """One line of the table."""
    env: Any = "CartPole-v1"
    if kind == "plain":
        env = _make
        beside = Loop(SyncVectorEnv([_make] * slots, copy=False, autoreset_mode=AutoresetMode.SAME_STEP))
    else:
        beside = Loop(gym.make_vec(env, num_envs=slots, vectorization_mode="vector_entry_point"))
    options: Any = {"num_envs": slots, "fragment_length": FRAGMENT_LENGTH, "seed": 0, "flat_forward": True}
    with Rollout(env, module=Policy(), **options) as rollout:
        batches = iter(rollout.batches())
        aim = AIMS["one slot" if slots == 1 else kind]
        return paired(
            f"CartPole, {kind}",
            slots,
            lambda: len(next(batches)["obs"]),
            beside.fragment,
            aim=aim,
            rounds=rounds,
            at_least_s=at_least_s,
            where="inline",
        )


def _make() -> gym.Env[Any, Any]:
    return gym.make("CartPole-v1")


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    quick = "--quick" in sys.argv
    kinds = [("vectorized", slots) for slots in VECTORIZED] + [("plain", slots) for slots in PLAIN]
    sizes: Any = {"rounds": 5, "at_least_s": 0.3} if quick else {"rounds": 11, "at_least_s": 1.0}
    show([measure(kind, slots, **sizes) for kind, slots in kinds])


if __name__ == "__main__":
    main()
