"""Environments in threads and processes, and whole rollouts in processes."""
