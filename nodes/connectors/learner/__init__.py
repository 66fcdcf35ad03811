"""Pieces before a learner."""
