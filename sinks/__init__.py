"""Sinks: the nodes in which a stream ends, and trainers in other processes that they feed.

A sink is a node without outputs: a callable of one item that is annotated `-> None`, or an object with
`async def run(self, fragments: Inlet[Fragment]) -> None`. It needs no base class and no registration:
`graph.add(replay=Replay())`, then `graph.connect("rollout.fragments", "replay")`. `examples/fan_out.py` has one of its
own, and "Nodes" in `docs/how_to/graphs.md` has a replay buffer.
"""

from typing import TYPE_CHECKING

from rollflow.stream.data.lazy_names import lazy_names

if TYPE_CHECKING:
    from rollflow.sinks.learner.learner_pipeline import (
        LearnerPipeline as LearnerPipeline,
        MultiAgentLearnerPipeline as MultiAgentLearnerPipeline,
    )
    from rollflow.sinks.replay.client import ReplayClient as ReplayClient
    from rollflow.sinks.replay.host import ReplayHost as ReplayHost
    from rollflow.sinks.replay.replay import SamplesPerInsert as SamplesPerInsert
    from rollflow.sinks.replay.row_index import Storage as Storage
    from rollflow.sinks.replay.sampled_steps import (
        HindsightGoals as HindsightGoals,
        SampledNStepReturns as SampledNStepReturns,
        SampledSteps as SampledSteps,
    )
    from rollflow.sinks.replay.samplers import (
        Draw as Draw,
        Episodes as Episodes,
        Prioritized as Prioritized,
        Sampler as Sampler,
        Sequences as Sequences,
        Uniform as Uniform,
    )
    from rollflow.sinks.trainer.item_maker import Batches as Batches
    from rollflow.sinks.trainer.process import TrainerProcess as TrainerProcess
    from rollflow.sinks.trainer.sink import TrainerSink as TrainerSink
    from rollflow.sinks.trainer.stream import Sources as Sources
    from rollflow.sinks.trainer.uplink import WeightsFollower as WeightsFollower

__all__, __getattr__, __dir__ = lazy_names(__name__)
