"""Lanes and fragments: the column memory of a lane, live episodes over it, and the fragments cut from it."""
