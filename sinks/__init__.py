"""Where the stream ends."""

from rollflow.sinks.feed import feed
from rollflow.sinks.learner_pipeline import LearnerPipeline, MultiAgentLearnerPipeline
from rollflow.sinks.trainer.dataset import TrainerDataset
from rollflow.sinks.trainer_process import TrainerProcess
from rollflow.sinks.trainer_sink import TrainerSink
from rollflow.sinks.trainer_stream import TrainerStream

__all__ = [
    "LearnerPipeline",
    "MultiAgentLearnerPipeline",
    "TrainerDataset",
    "TrainerProcess",
    "TrainerSink",
    "TrainerStream",
    "feed",
]
