"""A policy trained on CartPole acts in a newer one, with two features more to see and one action more to give."""

from typing import Any

import gymnasium as gym
import numpy as np
import torch

from rollflow import GeneralAdvantageEstimation, RLModule, Rollout
from rollflow.nodes.connectors.alpha import (
    ConnectorContext,
    ConnectorPolicy,
    default_action_connectors,
    default_agent_connectors,
    local_policy_inference,
    register_lambda_action_connector,
    register_lambda_agent_connector,
)

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


def v2_to_v1_obs(data: Any) -> Any:
    """Drop the features that the policy does not know."""
    return {**data, "new_obs": data["new_obs"][:-2]}


V2ToV1Obs = register_lambda_agent_connector("V2ToV1ObsAgentConnector", v2_to_v1_obs)
V1ToV2Action = register_lambda_action_connector(
    "V1ToV2ActionConnector", lambda actions, states, fetches: (np.hstack((actions, [0])), states, fetches)
)


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


def main(seed: int = 0) -> float:
    """Train in the old environment, adapt, and play in the new one; the mean return there."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    module, env = trained(seed), NewCartPole()
    ctx = ConnectorContext.from_policy(module)
    policy = ConnectorPolicy(module, default_agent_connectors(ctx), default_action_connectors(ctx))
    policy.agent_connectors.prepend(V2ToV1Obs(ctx))
    policy.action_connectors.append(V1ToV2Action(ctx))
    rewards = 0.0
    for episode in range(EPISODES):
        observation, _ = env.reset(seed=episode)
        policy.agent_connectors.reset("env_1")
        done = False
        while not done:
            ((action, _, _),) = local_policy_inference(policy, "env_1", "agent_1", observation, explore=False)
            observation, reward, terminated, truncated, _ = env.step(action)
            rewards, done = rewards + reward, terminated or truncated
    print(f"mean return {rewards / EPISODES:.1f} in the new environment")
    return rewards / EPISODES


if __name__ == "__main__":
    main()
