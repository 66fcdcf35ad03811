"""Items on their way to a trainer: fragments and train batches as messages."""
