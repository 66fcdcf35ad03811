"""Pipelines: connector pieces in a row, and the default ones."""
