"""Other engines, as they collect CartPole: those that are installed, in the same run."""
