"""Environments with several agents each in worker processes."""
