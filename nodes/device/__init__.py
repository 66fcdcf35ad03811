"""Environments whose tensors stay on one device."""
