"""Columns, lanes and fragments of environments with several agents each."""
