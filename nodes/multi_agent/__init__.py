"""Environments with several agents: as dicts, PettingZoo's, vectorized ones; and what a lane takes from them."""
