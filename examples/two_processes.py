"""PPO on CartPole-v1 with the trainer in a process of its own, until the last 100 episodes have a mean return of 475.

The rollout is that of `cartpole.py`, and so is the update. Both work at the same time: a batch may be one policy
version old, and no older, since the rollout waits rather than have anything thrown away.
"""

import time

import torch
from cartpole import FRAGMENT_LENGTH, LEARNING_RATE, MAX_UPDATES, NUM_ENVS, TARGET_RETURN, Policy, update

from rollflow import GeneralAdvantageEstimation, Rollout, TrainerStream, feed
from rollflow.sinks import Batches, TrainerProcess

MAX_LAG = 1


def train(stream: TrainerStream, policy: Policy, seed: int) -> float:
    """What the other process does: batches in, weights out; the mean return over the last 100 episodes."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE, eps=1e-5)
    for number, batch in enumerate(stream, start=1):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - number / (MAX_UPDATES + 1))
        update(policy, optimizer, batch)
        stream.publish(policy.state_dict())
        returns = stream.returns
        if number == MAX_UPDATES or (len(returns.returns) == 100 and returns.mean >= TARGET_RETURN):
            break
    return returns.mean


def main(seed: int = 0) -> float:
    """Train one policy; the mean return over the last 100 episodes."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    policy, began = Policy(), time.perf_counter()
    gae = GeneralAdvantageEstimation(gamma=0.99, lambda_=0.95)
    # The trainer gets the policy, and so do its connectors: it is the same there.
    batches = Batches(learner_connector=lambda obs, act: gae)
    stream = {"yields": batches, "module": policy, "max_lag": MAX_LAG, "on_excess": "pace"}
    rollout = Rollout("CartPole-v1", module=policy, num_envs=NUM_ENVS, fragment_length=FRAGMENT_LENGTH, seed=seed)
    with TrainerProcess(train, policy, seed, stream=stream) as trainer:
        goodbye = feed(rollout, trainer.address, watch=trainer.watch)
    seconds = time.perf_counter() - began
    print(f"mean return {trainer.result:.1f} after {rollout.num_steps:,} steps in {seconds:.0f} s: {goodbye}")
    return float(trainer.result)


if __name__ == "__main__":
    main()
