"""Seeing a run: the stall doctor, snapshots and the sockets that give them, traces, and pictures."""
