"""Environments with several agents, as columns."""
