"""The command `rollflow`."""
