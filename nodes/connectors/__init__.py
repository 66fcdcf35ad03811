"""Connector pieces: the interface, and what all pieces share."""
