"""A policy trained on CartPole acts in a newer one, with two features more to see and one action more to give."""

from typing import Any

import gymnasium as gym
import numpy as np
import torch

from rollflow import GeneralAdvantageEstimation, Policy, RLModule, Rollout

NUM_ENVS, FRAGMENT_LENGTH, UPDATES, EPOCHS, LEARNING_RATE, EPISODES = 16, 64, 60, 6, 3e-3, 10


class NewCartPole(gym.Env[Any, Any]):
    """CartPole whose observations have two more numbers, and whose actions have a second, unused, part."""

    observation_space = gym.spaces.Box(-10, 10, (6,), np.float32)
    action_space = gym.spaces.MultiDiscrete([2, 2])

    def __init__(self) -> None:
        self.old = gym.make("CartPole-v1")

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self.old.reset(seed=seed, options=options)
        return np.hstack((observation, [8.0, 6.0])), info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.old.step(int(action[0]))
        return np.hstack((observation, [8.0, 6.0])), float(reward), terminated, truncated, info


# Where what the policy sees, and what the environment takes, comes from: all but the two new features, and a 0.
FIELDS: dict[str, Any] = {f"observation[{i}]": f"observation[{i}]" for i in range(4)}
FIELDS |= {"action[0]": "action", "action[1]": 0}


def trained(seed: int) -> RLModule:
    """A module after some updates of PPO on CartPole."""
    gae = GeneralAdvantageEstimation()
    settings = {"num_envs": NUM_ENVS, "fragment_length": FRAGMENT_LENGTH, "seed": seed}
    with Rollout("CartPole-v1", learner_connector=lambda obs, act: gae, **settings) as rollout:
        module = rollout.module
        optimizer = torch.optim.Adam(module.parameters(), lr=LEARNING_RATE)
        for _, batch in zip(range(UPDATES), rollout.batches(), strict=False):
            for _ in range(EPOCHS):
                output, gains = module.forward_train(batch), batch["advantages"]
                distribution = torch.distributions.Categorical(logits=output["action_dist_inputs"])
                ratio = torch.exp(distribution.log_prob(batch["actions"]) - batch["action_logp"])
                gain = torch.min(ratio * gains, ratio.clamp(0.8, 1.2) * gains).mean()
                loss = 0.01 * (output["vf_preds"] - batch["value_targets"]).square().mean() - gain
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            rollout.publish(module.state_dict())
    return module


def adapted(module: RLModule, env: NewCartPole) -> Policy:
    """A policy of the old environment that acts in the new one, by the likeliest actions."""
    old = Policy(module, observation_space=module.observation_space, action_space=module.action_space)
    return old.adapted(env, fields=FIELDS)


def main(seed: int = 0) -> float:
    """Train in the old environment, adapt, and play in the new one; the mean return there."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    env = NewCartPole()
    policy = adapted(trained(seed), env)
    rewards = 0.0
    for episode in range(EPISODES):
        observation, _ = env.reset(seed=episode)
        policy.reset()
        done = False
        while not done:
            observation, reward, terminated, truncated, _ = env.step(policy.act(observation))
            rewards, done = rewards + reward, terminated or truncated
    print(f"mean return {rewards / EPISODES:.1f} in the new environment")
    return rewards / EPISODES


if __name__ == "__main__":
    main()
