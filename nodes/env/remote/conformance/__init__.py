"""Conformance checks for hosts that are written in other languages."""
