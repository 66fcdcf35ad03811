"""Logs: a run's figures by name, and the files, trackers and servers that they are written to."""
