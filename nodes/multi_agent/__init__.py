"""Environments with several agents: dict environments, PettingZoo's, vectorized ones, and what a lane takes from them."""
