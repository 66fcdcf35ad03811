"""Learner pipelines: train batches from fragments, for one agent and several."""
