"""A rollout and its trainer on one host: fragments that lie in memory which both of them see."""
