"""Messages of the protocol and their bytes."""
