"""Traces of runs: spans and fragments on one time axis, as events that Perfetto and chrome://tracing show."""
