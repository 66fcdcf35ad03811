"""Pieces behind the module."""
