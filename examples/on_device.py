"""PPO on a CartPole whose slots step together in torch tensors, which stay on a GPU if there is one."""

import math
import time
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor

from rollflow import DefaultModelConfig, GeneralAdvantageEstimation, Rollout, TorchEnvs, minibatches

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_ENVS, FRAGMENT_LENGTH = 128, 64
EPOCHS, MINIBATCH, LEARNING_RATE, CLIP, ENTROPY, VALUE = 8, 1024, 1e-3, 0.2, 0.01, 0.05
TARGET_RETURN, MAX_UPDATES = 400.0, 200
CONFIG = DefaultModelConfig(fcnet_hiddens=(64, 64), vf_share_layers=True)


class TorchCartPole:
    """CartPole-v1, N slots at once; a slot whose episode ends is reset in the same step."""

    single_action_space = gym.spaces.Discrete(2)

    def __init__(self, num_envs: int, device: Any = "cpu") -> None:
        self.num_envs, self.device, self._random = num_envs, torch.device(device), torch.Generator(device)

    def reset(self, *, seed: int = 0) -> Tensor:
        """Begin an episode in every slot: observations f32[N, 4]."""
        self._random.manual_seed(seed)
        self._steps = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        self._state = self._begun()
        return self._state

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Push every cart to the left (0) or to the right (1), i64[N]."""
        x, speed, angle, spin = self._state.unbind(1)
        sin, cos = angle.sin(), angle.cos()
        push = (actions * 20.0 - 10.0 + 0.05 * spin.square() * sin) / 1.1
        turn = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos.square() / 1.1))
        change = torch.stack([speed, push - 0.05 * turn * cos / 1.1, spin, turn], dim=1)
        last = self._state + 0.02 * change
        self._steps = self._steps + 1
        terminated = (last[:, 0].abs() > 2.4) | (last[:, 2].abs() > math.radians(12))
        truncated = (self._steps >= 500) & ~terminated
        done = terminated | truncated
        self._steps = self._steps.masked_fill(done, 0)
        self._state = torch.where(done[:, None], self._begun(), last)
        return self._state, torch.ones_like(x), terminated, truncated, {}

    def _begun(self) -> Tensor:
        return torch.rand(self.num_envs, 4, generator=self._random, device=self.device) * 0.1 - 0.05


def update(policy: Any, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> None:
    """Some epochs of PPO's clipped objective."""
    for _ in range(EPOCHS):
        for part in minibatches(batch, MINIBATCH):
            output = policy.forward_train(part)
            distribution = torch.distributions.Categorical(logits=output["action_dist_inputs"])
            ratio = torch.exp(distribution.log_prob(part["actions"]) - part["action_logp"])
            gain = torch.min(ratio * part["advantages"], ratio.clamp(1 - CLIP, 1 + CLIP) * part["advantages"])
            value_loss = (output["vf_preds"] - part["value_targets"]).square().clamp(max=100.0)
            optimizer.zero_grad()
            (VALUE * value_loss - gain - ENTROPY * distribution.entropy()).mean().backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()


def main(seed: int = 0) -> float:
    """Train one policy; the mean return over the last 100 episodes."""
    torch.manual_seed(seed)
    gae, began = GeneralAdvantageEstimation(gamma=0.99, lambda_=0.95), time.perf_counter()
    with Rollout(
        TorchEnvs(TorchCartPole(NUM_ENVS, DEVICE)),
        model_config=CONFIG,
        fragment_length=FRAGMENT_LENGTH,
        seed=seed,
        learner_connector=lambda obs_space, act_space: gae,
    ) as rollout:
        policy, returns = rollout.module, rollout.returns
        optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE, eps=1e-5)
        for number, batch in enumerate(rollout.batches(), start=1):
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - number / (MAX_UPDATES + 1))
            update(policy, optimizer, batch)
            rollout.publish(policy.state_dict())
            if number == MAX_UPDATES or returns.mean >= TARGET_RETURN:
                break
    seconds = time.perf_counter() - began
    print(f"mean return {returns.mean:.1f} after {rollout.num_steps:,} steps in {seconds:.0f} s, on {DEVICE}")
    return returns.mean


if __name__ == "__main__":
    main()
