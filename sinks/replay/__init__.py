"""Replay: fragments kept in memory, sampled again and again at a controlled rate."""
