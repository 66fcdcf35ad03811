"""Rollouts: the public classes, their loop, and where they run."""
