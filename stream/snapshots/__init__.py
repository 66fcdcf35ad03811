"""Snapshots of runs: the sockets that give them, and the folder in which other processes find these."""
