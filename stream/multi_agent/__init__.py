"""Columns, lanes and fragments of environments with several agents each."""

# np.unique imports it at its first call, in the thread of a lane: a process that is forked off just then, such as a
# worker of a DataLoader, would wait for the end of that import for ever.
import numpy.ma  # noqa: F401
