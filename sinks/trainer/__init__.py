"""Fragments to a trainer in another process or on another host, and weights back."""
