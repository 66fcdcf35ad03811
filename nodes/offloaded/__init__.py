"""Whole rollouts in worker processes and on other hosts."""
