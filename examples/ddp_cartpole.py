"""PPO on CartPole-v1 by two ranks of torch.distributed, each with a rollout and a stream of its own.

DistributedDataParallel averages the gradients, so the ranks keep the same weights, and each publishes them to its own
rollout. Under torchrun, call `train` with the rank and `init_method="env://"`; here `main` starts both processes.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from cartpole import EPOCHS, LEARNING_RATE, Policy, loss_of
from torch import nn

from rollflow import GeneralAdvantageEstimation, TrainerStream, minibatches
from rollflow.sinks import Batches

RANKS, UPDATES, PARTS = 2, 60, 4


def rollout(rank: int, address: str) -> "subprocess.Popen[bytes]":
    """What `rollflow rollout --env CartPole-v1 …` does, here or on another machine."""
    arguments = ["--env", "CartPole-v1", "--module", "cartpole:Policy", "--num-envs", "32", "--fragment-length", "64"]
    arguments += ["--seed", str(rank), "--name", f"rollout {rank}", "--trainer", address]
    command = [sys.executable, "-m", "rollflow.cli.main", "rollout", *arguments]
    return subprocess.Popen(command, cwd=Path(__file__).parent)


def train(rank: int, init_method: str, updates: int, save_to: Path) -> None:
    """Train as one of the ranks, and save the weights. All ranks make as many steps, whatever their batches' sizes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=RANKS)
    torch.manual_seed(rank)
    policy, gae = Policy(), GeneralAdvantageEstimation(gamma=0.99, lambda_=0.95)
    parallel = nn.parallel.DistributedDataParallel(policy)  # from here on all have the weights of rank 0
    optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE, eps=1e-5)
    batches = Batches(learner_connector=lambda obs, act: gae)
    with TrainerStream("tcp://127.0.0.1:0", yields=batches, module=policy) as stream:
        process = rollout(rank, str(stream.address))
        stream.publish(policy.state_dict())
        for number, batch in enumerate(stream, start=1):
            for _ in range(EPOCHS):
                for part in minibatches(batch, -(-len(batch["obs"]) // PARTS)):
                    optimizer.zero_grad()
                    loss_of(parallel(part), part).backward()
                    nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
                    optimizer.step()
            stream.publish(policy.state_dict())
            if number == updates:
                break
    process.wait()
    print(f"rank {rank}: mean return {stream.returns.mean:.1f} after {updates} updates")
    torch.save(policy.state_dict(), save_to / f"rank_{rank}.pt")
    dist.destroy_process_group()


def main(updates: int = UPDATES, save_to: Path | None = None) -> None:
    """Start the ranks, and wait for them."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = f"file://{folder}/ranks", updates, save_to or Path(folder)
        torch.multiprocessing.spawn(train, arguments, nprocs=RANKS)


if __name__ == "__main__":
    main()
