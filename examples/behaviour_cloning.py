"""Behaviour cloning on CartPole-v1: an expert is recorded to a dataset, and a policy learns to act as it does."""

import tempfile
from typing import Any

import torch
from torch import nn

from rollflow import DatasetSink, DatasetSource, Policy, RLModule, Rollout

NUM_ENVS, FRAGMENT_LENGTH, FRAGMENTS = 16, 100, 10
PASSES, BATCH, LEARNING_RATE, EPISODES = 20, 256, 3e-3, 50


class Expert(RLModule):
    """A hand-written controller: it pushes to where the pole falls, and a little back to the middle."""

    def _forward(self, batch: dict[str, torch.Tensor], **kwargs: Any) -> dict[str, torch.Tensor]:
        lean = batch["obs"] @ torch.tensor([0.05, 0.3, 1.0, 0.6])
        return {"action_dist_inputs": torch.stack([-10 * lean, 10 * lean], dim=-1)}


class Student(RLModule):
    """One hidden layer."""

    def setup(self) -> None:
        self.layers = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))

    def _forward(self, batch: dict[str, torch.Tensor], **kwargs: Any) -> dict[str, torch.Tensor]:
        return {"action_dist_inputs": self.layers(batch["obs"])}


def record(path: str, seed: int) -> None:
    """Write steps of the expert to a dataset."""
    settings: dict[str, Any] = {"num_envs": NUM_ENVS, "fragment_length": FRAGMENT_LENGTH, "num_fragments": FRAGMENTS}
    with (
        Rollout("CartPole-v1", module=Expert(), seed=seed, **settings) as rollout,
        DatasetSink(path, rollout=rollout) as sink,
    ):
        for fragment in rollout.fragments():
            sink(fragment)


def main(seed: int = 0) -> float:
    """Record, and learn from the files alone; the mean return of the student's likeliest actions."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    student = Student()
    optimizer = torch.optim.Adam(student.parameters(), lr=LEARNING_RATE)
    with tempfile.TemporaryDirectory() as path:
        record(path, seed)
        source = DatasetSource(path, batch_size=BATCH, shuffle_seed=seed, passes=PASSES, module=student)
        for batch in source.batches():
            logits = student.forward_train(batch)["action_dist_inputs"]
            loss = nn.functional.cross_entropy(logits, batch["actions"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        spaces = {"observation_space": source.observation_space, "action_space": source.action_space}
    evaluation = Policy(student, **spaces).evaluate("CartPole-v1", EPISODES, seed=seed)
    print(f"mean return {evaluation.mean:.1f} after {PASSES} passes over {source.num_steps:,} steps of the expert")
    return evaluation.mean


if __name__ == "__main__":
    main()
