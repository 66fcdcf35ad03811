"""Where the stream ends."""

from rollflow.sinks.learner_pipeline import LearnerPipeline

__all__ = ["LearnerPipeline"]
