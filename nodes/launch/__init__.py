"""Hosts that a rollout starts itself: launchers, and the places that they start hosts in."""
