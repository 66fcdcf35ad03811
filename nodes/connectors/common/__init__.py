"""Pieces that stand before the module, while acting and for training."""
