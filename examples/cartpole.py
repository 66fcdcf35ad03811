"""PPO on CartPole-v1, until the last 100 episodes have a mean return of 475.

`--resume FOLDER` keeps checkpoints there, and goes on from the newest one: killed at any time, it ends with the same
weights.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rollflow import Checkpoints, GeneralAdvantageEstimation, RLModule, Rollout, minibatches

NUM_ENVS, FRAGMENT_LENGTH = 64, 64
EPOCHS, MINIBATCH, LEARNING_RATE, CLIP, ENTROPY = 8, 512, 2e-3, 0.2, 0.01
TARGET_RETURN, MAX_UPDATES = 475.0, 400


class Policy(RLModule):
    """Two hidden layers, one head for the logits and one for the value."""

    def setup(self) -> None:
        self.trunk = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.logits, self.value = nn.Linear(64, 2), nn.Linear(64, 1)

    def _forward(self, batch: dict[str, torch.Tensor], **kwargs: Any) -> dict[str, torch.Tensor]:
        hidden = self.trunk(batch["obs"])
        return {"action_dist_inputs": self.logits(hidden), "vf_preds": self.value(hidden).squeeze(-1)}


def loss_of(output: dict[str, torch.Tensor], part: dict[str, torch.Tensor]) -> torch.Tensor:
    """PPO's clipped objective, of a policy's output for a part of a batch."""
    distribution = torch.distributions.Categorical(logits=output["action_dist_inputs"])
    ratio = torch.exp(distribution.log_prob(part["actions"]) - part["action_logp"])
    advantages = part["advantages"]
    gain = torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()
    value_loss = (output["vf_preds"] - part["value_targets"]).square().clamp(max=100.0).mean()
    return 0.05 * value_loss - gain - ENTROPY * distribution.entropy().mean()


def update(policy: Policy, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> None:
    """Some epochs of PPO."""
    for _ in range(EPOCHS):
        for part in minibatches(batch, MINIBATCH):
            loss = loss_of(policy.forward_train(part), part)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()


def rollout_of(policy: Policy, seed: int, folder: str | None) -> Rollout:
    """The rollout; with a folder that has a checkpoint, the one that goes on from it."""
    gae = GeneralAdvantageEstimation(gamma=0.99, lambda_=0.95)
    given: dict[str, Any] = {"module": policy, "learner_connector": lambda obs, act: gae}
    if folder is not None and any(Path(folder).glob("checkpoint-*")):
        return Rollout.resume(folder, **given)
    checkpoints = None if folder is None else Checkpoints(folder, every_s=1.0)
    settings = {"num_envs": NUM_ENVS, "fragment_length": FRAGMENT_LENGTH, "seed": seed, "checkpoints": checkpoints}
    return Rollout("CartPole-v1", **settings, **given)


def main(seed: int = 0, save_to: str | None = None, folder: str | None = None) -> float:
    """Train one policy, and save it where one says where; the mean return over the last 100 episodes."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE, eps=1e-5)
    began, tty = time.perf_counter(), sys.stdout.isatty()
    with rollout_of(policy, seed, folder) as rollout:
        rollout.attach(optimizer=optimizer)
        for batch in rollout.batches():
            number = rollout.log.rounds
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - number / (MAX_UPDATES + 1))
            update(policy, optimizer, batch)
            version = rollout.publish(policy.state_dict())
            returns, seconds = rollout.returns, time.perf_counter() - began
            if tty:
                line = f"{rollout.num_steps / seconds:8,.0f} steps/s   mean return {returns.mean:6.1f}   "
                line += f"policy version {version}   held back by {rollout.report().bottleneck}"
                print(f"\r{line}", end="", flush=True)
            if number == MAX_UPDATES or (len(returns.returns) == 100 and returns.mean >= TARGET_RETURN):
                break
        if save_to is not None:
            rollout.save_policy(save_to, onnx=True)
    print("\n" * tty + f"mean return {returns.mean:.1f} after {rollout.num_steps:,} steps in {seconds:.0f} s")
    return returns.mean


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="PPO on CartPole-v1")
    parser.add_argument("--resume", metavar="FOLDER", help="keep checkpoints there, and go on from the newest one")
    main(folder=parser.parse_args().resume)
