"""Modules: networks, distributions, flat forward passes, weights and their versions."""
