"""Stable-Baselines3's PPO update over fragments of rollflow, on CartPole-v1 (`pip install stable-baselines3`).

`PPO.train` reads a `RolloutBuffer` of [steps, environments]: `fragment.time_major()` has its columns in that shape. The
policy is Stable-Baselines3's own.
"""

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import configure

from rollflow import RLModule, Rollout

NUM_ENVS, STEPS = 8, 128
TARGET_RETURN, MAX_UPDATES = 195.0, 200


class Sb3Policy(RLModule):
    """The policy of a model, as a module."""

    def __init__(self, policy: Any) -> None:
        super().__init__(observation_space=policy.observation_space, action_space=policy.action_space)
        self.policy = policy

    def _forward(self, batch: dict[str, torch.Tensor], **kwargs: Any) -> dict[str, torch.Tensor]:
        policy = self.policy
        of_action, of_value = policy.mlp_extractor(policy.extract_features(batch["obs"]))
        return {"action_dist_inputs": policy.action_net(of_action), "vf_preds": policy.value_net(of_value).squeeze(-1)}


def fill(model: PPO, steps: dict[str, Any], starts: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Fill a model's buffer from a fragment's columns; which environments begin an episode after it.

    starts    bool[N]    those that begin one with it
    """
    buffer = model.rollout_buffer
    buffer.reset()
    with torch.no_grad():
        after = model.policy.predict_values(torch.tensor(steps["new_obs"]).flatten(0, 1)).view(STEPS, NUM_ENVS)
    # An episode that was cut off by its time limit goes on, for the value.
    rewards = steps["rewards"] + model.gamma * steps["truncateds"] * after.numpy()
    for step in range(STEPS):
        values, logps = (torch.tensor(steps[name][step]) for name in ("vf_preds", "action_logp"))
        buffer.add(steps["obs"][step], steps["actions"][step].reshape(-1, 1), rewards[step], starts, values, logps)
        starts = steps["terminateds"][step] | steps["truncateds"][step]
    buffer.compute_returns_and_advantage(last_values=after[-1], dones=starts)
    return starts


def main(seed: int = 0) -> float:
    """Train one policy; the mean return over the last 100 episodes."""
    torch.set_num_threads(1)
    sizes = make_vec_env("CartPole-v1", n_envs=NUM_ENVS)  # which only says how many there are
    model = PPO("MlpPolicy", sizes, n_steps=STEPS, batch_size=256, learning_rate=1e-3, seed=seed, device="cpu")
    model.set_logger(configure(None, []))
    starts = np.ones(NUM_ENVS, np.bool_)
    options: dict[str, Any] = {"num_envs": NUM_ENVS, "fragment_length": STEPS, "seed": seed}
    # Environments one by one: their resets take no step, so that every row is a transition.
    with Rollout(lambda: gym.make("CartPole-v1"), module=Sb3Policy(model.policy), **options) as rollout:
        for number, fragment in enumerate(rollout.fragments(), start=1):
            starts = fill(model, fragment.time_major(), starts)
            model.train()
            rollout.publish(rollout.module.state_dict())
            if number == MAX_UPDATES or (number > 20 and rollout.returns.mean >= TARGET_RETURN):
                break
    print(f"mean return {rollout.returns.mean:.1f} after {rollout.num_steps:,} steps")
    return rollout.returns.mean


if __name__ == "__main__":
    main()
