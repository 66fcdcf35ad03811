"""Environment sources, and stepping in this process."""
