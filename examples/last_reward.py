"""The last reward as part of the observation, for a game in which nothing else tells what to do."""

from typing import Any

import gymnasium as gym
import numpy as np
import torch

from rollflow import ConnectorV2, GeneralAdvantageEstimation, RLModule, Rollout

NUM_ENVS, FRAGMENT_LENGTH, UPDATES, LEARNING_RATE, ROUNDS = 16, 32, 60, 1e-2, 16


class FollowTheReward(gym.Env[Any, Any]):
    """Each reward is -1 or 1, by chance, and half as much on top for the action that the reward before called for."""

    observation_space = gym.spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.round, self.called_for = 0, 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        bonus = 0.5 * (action == self.called_for)
        self.round, self.called_for = self.round + 1, int(self.np_random.integers(2))
        return np.zeros(1, np.float32), 2.0 * self.called_for - 1.0 + bonus, self.round == ROUNDS, False, {}


class AddLastRewardToObservations(ConnectorV2):
    """Appends to each observation the reward that came with it."""

    def recompute_output_observation_space(self, in_obs_space: Any, in_act_space: Any) -> gym.Space[Any]:
        low, high = np.append(in_obs_space.low, -np.inf), np.append(in_obs_space.high, np.inf)
        return gym.spaces.Box(low.astype(np.float32), high.astype(np.float32))

    def __call__(self, *, batch: dict[str, Any], episodes: Any, **kwargs: Any) -> dict[str, Any]:
        for episode in self.single_agent_episode_iterator(episodes):
            reward = episode.get_rewards(-1, fill=0.0)  # 0 right after a reset
            new_obs = np.append(episode.get_observations(-1), reward).astype(np.float32)
            episode.set_observations(new_data=new_obs, at_indices=-1)
        return batch


def update(policy: RLModule, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> None:
    """One step of advantage actor-critic."""
    output = policy.forward_train(batch)
    distribution = torch.distributions.Categorical(logits=output["action_dist_inputs"])
    gain = (distribution.log_prob(batch["actions"]) * batch["advantages"]).mean()
    optimizer.zero_grad()
    (0.1 * (output["vf_preds"] - batch["value_targets"]).square().mean() - gain).backward()
    optimizer.step()


def main(seed: int = 0) -> float:
    """Train one policy; the share of actions that were called for, of the last fragment's."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    with Rollout(
        FollowTheReward,
        num_envs=NUM_ENVS,
        fragment_length=FRAGMENT_LENGTH,
        seed=seed,
        env_to_module_connector=lambda env: AddLastRewardToObservations(),
        learner_connector=lambda obs_space, act_space: GeneralAdvantageEstimation(gamma=0.0),
    ) as rollout:
        policy = rollout.module
        optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE)
        for _, batch in zip(range(UPDATES), rollout.batches(), strict=False):
            update(policy, optimizer, batch)
            rollout.publish(policy.state_dict())
    right = float(((batch["obs"][:, 1] > 0) == batch["actions"].bool()).float().mean())
    print(f"did what the last reward called for in {right:.0%} of the steps")
    return right


if __name__ == "__main__":
    main()
