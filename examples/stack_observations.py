"""The ten most recent observations as one: with those, CartPole can be balanced without being told any velocity."""

from typing import Any

import gymnasium as gym
import numpy as np
import torch

from rollflow import ConnectorV2, FrameStacking, GeneralAdvantageEstimation, RLModule, Rollout, minibatches

NUM_FRAMES, NUM_ENVS, FRAGMENT_LENGTH = 10, 32, 128
EPOCHS, MINIBATCH, LEARNING_RATE, CLIP, ENTROPY = 8, 512, 2e-3, 0.2, 0.01
TARGET_RETURN, UPDATES = 475.0, 200


class StackLast10Observations(ConnectorV2):
    """Puts the last ten observations' positions into the batch, oldest first; the episode keeps single ones."""

    lookback = NUM_FRAMES - 1

    def recompute_output_observation_space(self, in_obs_space: Any, in_act_space: Any) -> gym.Space[Any]:
        return gym.spaces.Box(np.tile(in_obs_space.low, NUM_FRAMES), np.tile(in_obs_space.high, NUM_FRAMES))

    def __call__(self, *, batch: dict[str, Any], episodes: Any, **kwargs: Any) -> dict[str, Any]:
        for episode in self.single_agent_episode_iterator(episodes):
            last_10 = episode.get_observations(list(range(-NUM_FRAMES, 0)), fill=0.0)
            self.add_batch_item(batch, "obs", np.concatenate(list(last_10)), episode)
        return batch


def positions(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """Of the observation only where cart and pole are."""
    space: Any = env.observation_space
    return gym.wrappers.TransformObservation(env, lambda obs: obs[::2], gym.spaces.Box(space.low[::2], space.high[::2]))


def update(policy: RLModule, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> None:
    """Some epochs of PPO's clipped objective."""
    for _ in range(EPOCHS):
        for part in minibatches(batch, MINIBATCH):
            output = policy.forward_train(part)
            distribution = torch.distributions.Categorical(logits=output["action_dist_inputs"])
            ratio = torch.exp(distribution.log_prob(part["actions"]) - part["action_logp"])
            gain = torch.min(ratio * part["advantages"], ratio.clamp(1 - CLIP, 1 + CLIP) * part["advantages"]).mean()
            value_loss = (output["vf_preds"] - part["value_targets"]).square().clamp(max=100.0).mean()
            optimizer.zero_grad()
            (0.05 * value_loss - gain - ENTROPY * distribution.entropy().mean()).backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()


def main(seed: int = 0, save_to: str | None = None) -> float:
    """Train one policy, and save it where one says where; the mean return over the last 100 episodes."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    with Rollout(
        lambda: positions(gym.make("CartPole-v1")),
        model_config={"fcnet_hiddens": [64, 64]},
        num_envs=NUM_ENVS,
        fragment_length=FRAGMENT_LENGTH,
        seed=seed,
        env_to_module_connector=lambda env: StackLast10Observations(),
        # What is in a forward batch alone has to be made once more for the learner: by the piece off the shelf.
        learner_connector=lambda obs_space, act_space: [
            FrameStacking(num_frames=NUM_FRAMES, as_learner_connector=True),
            GeneralAdvantageEstimation(gamma=0.99, lambda_=0.95),
        ],
    ) as rollout:
        policy, returns = rollout.module, rollout.returns
        optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE, eps=1e-5)
        for number, batch in enumerate(rollout.batches(), start=1):
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - number / (UPDATES + 1))
            update(policy, optimizer, batch)
            rollout.publish(policy.state_dict())
            if number == UPDATES or (len(returns.returns) == 100 and returns.mean >= TARGET_RETURN):
                break
        if save_to is not None:
            rollout.save_policy(save_to)
    print(f"mean return {returns.mean:.1f} after {rollout.num_steps:,} steps")
    return returns.mean


if __name__ == "__main__":
    main()
