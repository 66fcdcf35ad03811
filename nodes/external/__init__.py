"""Environments that step themselves, and ask for actions."""
