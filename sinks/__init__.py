"""Sinks: the nodes in which a stream ends, and trainers in other processes that they feed.

A sink is a node without outputs: a callable of one item that is annotated `-> None`, or an object with
`async def run(self, fragments: Inlet[Fragment]) -> None`. It needs no base class and no registration:
`graph.add(replay=Replay())`, then `graph.connect("rollout.fragments", "replay")`. `examples/fan_out.py` has one of its
own, and "A sink of your own" in `docs/architecture.md` is a replay buffer.
"""

from rollflow.sinks.datasets.dataset_sink import DatasetSink
from rollflow.sinks.datasets.dataset_source import DatasetSource
from rollflow.sinks.learner.learner_pipeline import LearnerPipeline, MultiAgentLearnerPipeline
from rollflow.sinks.replay.client import ReplayClient
from rollflow.sinks.replay.host import ReplayHost
from rollflow.sinks.replay.pieces import HindsightGoals, SampledNStepReturns
from rollflow.sinks.replay.prioritized import Prioritized
from rollflow.sinks.replay.rate import ReplayReport, SamplesPerInsert
from rollflow.sinks.replay.removers import AfterSamples, LowestPriority, Oldest, Remover
from rollflow.sinks.replay.replay import Replay
from rollflow.sinks.replay.row_columns import Storage
from rollflow.sinks.replay.sampled_steps import SampledSteps
from rollflow.sinks.replay.samplers import Draw, Episodes, Mixture, Newest, Sampler, Sequences, Uniform
from rollflow.sinks.trainer.feed import feed
from rollflow.sinks.trainer.process import TrainerProcess
from rollflow.sinks.trainer.ranks.dataset import TrainerDataset
from rollflow.sinks.trainer.rollout_side.follower import WeightsFollower
from rollflow.sinks.trainer.sink import TrainerSink
from rollflow.sinks.trainer.stream import TrainerStream

__all__ = [
    "AfterSamples",
    "DatasetSink",
    "DatasetSource",
    "Draw",
    "Episodes",
    "HindsightGoals",
    "LearnerPipeline",
    "LowestPriority",
    "Mixture",
    "MultiAgentLearnerPipeline",
    "Newest",
    "Oldest",
    "Prioritized",
    "Remover",
    "Replay",
    "ReplayClient",
    "ReplayHost",
    "ReplayReport",
    "SampledNStepReturns",
    "SampledSteps",
    "Sampler",
    "SamplesPerInsert",
    "Sequences",
    "Storage",
    "TrainerDataset",
    "TrainerProcess",
    "TrainerSink",
    "TrainerStream",
    "Uniform",
    "WeightsFollower",
    "feed",
]
