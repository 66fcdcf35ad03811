"""Environments in threads and worker processes."""
