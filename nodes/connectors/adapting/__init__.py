"""Pieces that fit a policy into an environment with other spaces."""
