"""Pieces before the module, while acting."""
