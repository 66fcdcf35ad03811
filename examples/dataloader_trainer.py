"""An ordinary PyTorch training script whose batches come from a DataLoader, over rollouts in processes of their own.

The rollouts are started by `rollflow rollout …` on this machine; on others, give them the trainer's address, and both
sides a secret. What the loader's workers have prefetched was made with older weights: PPO's clipping is for that.
"""

import subprocess
import sys
from pathlib import Path

import torch
from cartpole import LEARNING_RATE, Policy, update

from rollflow.nodes import GeneralAdvantageEstimation
from rollflow.sinks import TrainerStream

UPDATES, ROLLOUTS = 60, 2


def rollout(seed: int, address: str) -> "subprocess.Popen[bytes]":
    """What `rollflow rollout --env CartPole-v1 …` does, here or on another machine."""
    arguments = ["--env", "CartPole-v1", "--module", "cartpole:Policy", "--num-envs", "32", "--fragment-length", "64"]
    arguments += ["--seed", str(seed), "--name", f"rollout {seed}", "--trainer", address]
    command = [sys.executable, "-m", "rollflow.cli.main", "rollout", *arguments]
    return subprocess.Popen(command, cwd=Path(__file__).parent)


def main(seed: int = 0) -> float:
    """Train one policy; the mean return over the last 100 episodes."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    policy, gae = Policy(), GeneralAdvantageEstimation(gamma=0.99, lambda_=0.95)
    optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE, eps=1e-5)
    settings = {"module": policy, "learner_connector": lambda obs, act: gae, "sources": ROLLOUTS, "prefetch": 0}
    with TrainerStream("tcp://127.0.0.1:0", **settings) as stream:
        rollouts = [rollout(seed * ROLLOUTS + number, str(stream.address)) for number in range(ROLLOUTS)]
        batches = stream.dataset(prefetch_factor=1).loader(num_workers=1)
        for number, batch in enumerate(batches, start=1):
            update(policy, optimizer, batch)
            version = stream.publish(policy.state_dict())
            lag = version - batch["policy_version"].min()
            if number % 10 == 0:
                print(f"update {number:3}: {len(batch['obs'])} steps, lag {lag}, mean return {stream.returns.mean:.1f}")
            if number == UPDATES:
                break
    for process in rollouts:
        process.wait()
    print(f"mean return {stream.returns.mean:.1f} from {ROLLOUTS} rollouts")
    return stream.returns.mean


if __name__ == "__main__":
    main()
