"""Ranks: the processes of one trainer, and the workers of a data loader."""
