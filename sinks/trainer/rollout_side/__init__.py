"""Rollout side of a trainer connection: what is sent, kept for resending, and lent."""
