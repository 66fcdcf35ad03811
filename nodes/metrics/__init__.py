"""Metrics: loggers, statistics, and the returns of episodes."""
