"""Arrays, trees of arrays, columns, spaces, infos, shared memory, and the errors that all of rollflow raises."""
