"""Environments with several agents each on other hosts."""
