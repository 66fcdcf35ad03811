"""One rollout, two sinks at once: a learner that gets every fragment, and a slow logger that may miss some.

The logger's edge drops its oldest fragment when it is full, so that it never holds the learner back.
"""

import anyio
import torch

from rollflow import Fragment, Graph, RLModule, Rollout
from rollflow.sinks import LearnerPipeline
from rollflow.stream import Inlet

NUM_ENVS, FRAGMENT_LENGTH, NUM_FRAGMENTS = 64, 64, 60
SECONDS_PER_FRAGMENT = 0.1  # what the logger takes


class Policy(RLModule):
    """One linear layer."""

    def setup(self) -> None:
        self.logits = torch.nn.Linear(4, 2)

    def _forward(self, batch: dict[str, torch.Tensor], **kwargs: object) -> dict[str, torch.Tensor]:
        return {"action_dist_inputs": self.logits(batch["obs"])}


class SlowLogger:
    """Takes its time over every fragment."""

    def __init__(self) -> None:
        self.logged = 0

    async def run(self, fragments: Inlet[Fragment]) -> None:
        async for fragment in fragments:
            await anyio.sleep(SECONDS_PER_FRAGMENT)
            self.logged += fragment.num_steps


async def main() -> None:
    """Run to the end, and print what each sink got."""
    torch.set_num_threads(1)
    settings = {"num_envs": NUM_ENVS, "fragment_length": FRAGMENT_LENGTH, "num_fragments": NUM_FRAGMENTS, "seed": 0}
    rollout = Rollout("CartPole-v1", module=Policy(), **settings)
    logger = SlowLogger()
    graph = Graph("fan_out")
    graph.add(rollout=rollout, learner=LearnerPipeline(rollout.learner_pipeline, rollout.module), logger=logger)
    graph.connect("rollout.fragments", "learner", capacity=2)
    graph.connect("rollout.fragments", "logger", capacity=1, overflow="drop_oldest")
    graph.output("batches", "learner")
    print(graph.explain(), end="\n\n")
    learnt = 0
    async with graph.run() as run:
        async for batch in run["batches"]:
            learnt += len(batch["obs"])
        await run.wait()
        print(run.report(), end="\n\n")
    print(f"{rollout.num_steps:,} steps made, {learnt:,} learnt from, {logger.logged:,} logged")


if __name__ == "__main__":
    anyio.run(main)
