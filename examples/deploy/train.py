"""Trainer of `compose.yaml`: PPO on CartPole-v1 with rollouts on two hosts, and a saved policy for a server."""

import sys
from pathlib import Path

import torch
from cartpole import LEARNING_RATE, MAX_UPDATES, TARGET_RETURN, Policy, update

from rollflow import GeneralAdvantageEstimation, RemoteRollouts, Rollout

SAVE_EVERY = 25  # updates


def main(address: str, key: str, saved: str) -> None:
    """Train one policy with the hosts that dial the address and know the secret in a file; save it again and again."""
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE, eps=1e-5)
    gae = GeneralAdvantageEstimation(gamma=0.99, lambda_=0.95)
    rollouts = RemoteRollouts.listen(address, secret=Path(key).read_text(), hosts=2)
    with Rollout(rollouts, module=policy, learner_connector=lambda obs, act: gae, fragment_length=64) as rollout:
        for number, batch in enumerate(rollout.batches(), start=1):
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - number / (MAX_UPDATES + 1))
            update(policy, optimizer, batch)
            rollout.publish(policy.state_dict())
            returns = rollout.returns
            is_over = number == MAX_UPDATES or (len(returns.returns) == 100 and returns.mean >= TARGET_RETURN)
            if is_over or number % SAVE_EVERY == 1:
                rollout.save_policy(saved)
                print(f"update {number}: mean return {returns.mean:.1f}, saved")
            if is_over:
                break


if __name__ == "__main__":
    main(*sys.argv[1:])
