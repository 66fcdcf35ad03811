"""PPO with an LSTM on CartPole-v1 without velocities: only who remembers can tell which way the pole is falling."""

import time
from typing import Any

import gymnasium as gym
import torch

from rollflow import DefaultModelConfig, GeneralAdvantageEstimation, MeanStdFilter, RLModule, Rollout, minibatches
from rollflow.nodes import ObservationPreprocessor

NUM_ENVS, FRAGMENT_LENGTH = 32, 128
EPOCHS, MINIBATCH_ROWS, LEARNING_RATE, CLIP, ENTROPY, VALUE = 10, 64, 3e-3, 0.2, 0.01, 0.01
TARGET_RETURN, MAX_UPDATES = 475.0, 200
CONFIG = DefaultModelConfig(fcnet_hiddens=(64,), use_lstm=True, lstm_cell_size=64, max_seq_len=16)


class WithoutVelocities(ObservationPreprocessor):
    """Leaves of the observation only the positions of cart and pole."""

    def recompute_output_observation_space(self, in_obs_space: Any, in_act_space: Any) -> gym.Space[Any]:
        return gym.spaces.Box(in_obs_space.low[::2], in_obs_space.high[::2])

    def preprocess(self, observation: Any, episode: Any) -> Any:
        return observation[::2]


def update(policy: RLModule, optimizer: torch.optim.Optimizer, batch: dict[str, Any]) -> None:
    """Some epochs of PPO's clipped objective over rows of `max_seq_len` steps, those of the padding left out."""
    for _ in range(EPOCHS):
        for part in minibatches(batch, MINIBATCH_ROWS):
            output = policy.forward_train(part)
            mask, distribution = part["loss_mask"], torch.distributions.Categorical(logits=output["action_dist_inputs"])
            ratio = torch.exp(distribution.log_prob(part["actions"]) - part["action_logp"])
            advantages = part["advantages"]
            gain = torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
            value_loss = (output["vf_preds"] - part["value_targets"]).square().clamp(max=100.0)
            optimizer.zero_grad()
            (VALUE * value_loss - gain - ENTROPY * distribution.entropy())[mask].mean().backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()


def main(seed: int = 0, save_to: str | None = None) -> float:
    """Train one policy, and save it where one says where; the mean return over the last 100 episodes."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    began = time.perf_counter()
    with Rollout(
        "CartPole-v1",
        model_config=CONFIG,
        num_envs=NUM_ENVS,
        fragment_length=FRAGMENT_LENGTH,
        seed=seed,
        env_to_module_connector=lambda env: [WithoutVelocities(), MeanStdFilter()],
        learner_connector=lambda obs_space, act_space: GeneralAdvantageEstimation(gamma=0.99, lambda_=0.95),
    ) as rollout:
        policy, returns = rollout.module, rollout.returns
        optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE, eps=1e-5)
        for number, batch in enumerate(rollout.batches(), start=1):
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - number / (MAX_UPDATES + 1))
            update(policy, optimizer, batch)
            rollout.publish(policy.state_dict())
            if number == MAX_UPDATES or (len(returns.returns) == 100 and returns.mean >= TARGET_RETURN):
                break
        if save_to is not None:
            rollout.save_policy(save_to)
    print(f"mean return {returns.mean:.1f}, {rollout.num_steps:,} steps in {time.perf_counter() - began:.0f} s")
    return returns.mean


if __name__ == "__main__":
    main()
