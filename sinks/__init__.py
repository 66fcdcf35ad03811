"""Where the stream ends."""

from rollflow.sinks.learner_pipeline import LearnerPipeline
from rollflow.sinks.trainer.dataset import TrainerDataset
from rollflow.sinks.trainer_sink import TrainerSink
from rollflow.sinks.trainer_stream import TrainerStream

__all__ = ["LearnerPipeline", "TrainerDataset", "TrainerSink", "TrainerStream"]
