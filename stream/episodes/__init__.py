"""Episodes with RLlib's interface, for one agent and several, and the buffers that they are made of."""
