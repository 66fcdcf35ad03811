"""Connector pieces and pipelines, one piece a file."""
