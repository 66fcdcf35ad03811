"""Trainer side: connections that are accepted, items that are taken in, and the weights that go back."""
