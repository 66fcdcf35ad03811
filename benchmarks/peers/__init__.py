"""Other engines, as they collect CartPole with 64 slots: those that are installed, in the same run."""
