"""A preprocessor of one's own: FrozenLake's numbers as one-hot vectors, and a policy that finds the way."""

from typing import Any

import gymnasium as gym
import numpy as np
import torch

from rollflow import GeneralAdvantageEstimation, RLModule, Rollout
from rollflow.nodes import ObservationPreprocessor

LAKE = ["SFF", "FHF", "FFG"]
NUM_ENVS, FRAGMENT_LENGTH, UPDATES, LEARNING_RATE, ENTROPY = 16, 32, 60, 1e-2, 0.01


class OneHot(ObservationPreprocessor):
    """Makes of a Discrete observation a vector with a one at its place."""

    def recompute_output_observation_space(self, in_obs_space: gym.Space[Any], in_act_space: gym.Space[Any]) -> Any:
        assert isinstance(in_obs_space, gym.spaces.Discrete)
        return gym.spaces.Box(0.0, 1.0, (int(in_obs_space.n),), np.float32)

    def preprocess(self, observation: Any, episode: Any) -> Any:
        assert self.observation_space is not None
        new_obs = np.zeros(self.observation_space.shape or (), np.float32)
        new_obs[observation] = 1.0
        return new_obs


def update(policy: RLModule, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> None:
    """One step of advantage actor-critic."""
    output = policy.forward_train(batch)
    distribution = torch.distributions.Categorical(logits=output["action_dist_inputs"])
    gain = (distribution.log_prob(batch["actions"]) * batch["advantages"]).mean()
    value_loss = (output["vf_preds"] - batch["value_targets"]).square().mean()
    optimizer.zero_grad()
    (0.5 * value_loss - gain - ENTROPY * distribution.entropy().mean()).backward()
    optimizer.step()


def main(seed: int = 0) -> float:
    """Train one policy; the mean return over the last 100 episodes, 1 at best."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    with Rollout(
        lambda: gym.make("FrozenLake-v1", desc=LAKE, is_slippery=False),
        num_envs=NUM_ENVS,
        fragment_length=FRAGMENT_LENGTH,
        seed=seed,
        env_to_module_connector=lambda env: OneHot(),
        learner_connector=lambda obs_space, act_space: GeneralAdvantageEstimation(gamma=0.95),
    ) as rollout:
        policy = rollout.module
        optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE)
        for number, batch in enumerate(rollout.batches(), start=1):
            update(policy, optimizer, batch)
            rollout.publish(policy.state_dict())
            if number == UPDATES:
                break
    print(f"reached the goal in {rollout.returns.mean:.0%} of the last 100 episodes")
    return rollout.returns.mean


if __name__ == "__main__":
    main()
