"""Policies that act without the rollout that trained them: sessions, artifacts, evaluation."""
