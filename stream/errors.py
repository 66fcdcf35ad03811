"""Every error that rollflow raises on purpose.

Two families: *you drew it wrong* (a graph, a column, an episode, a piece that does not fit), raised before
anything runs wherever that can be known, and *something broke while running*. Each class is also the built-in
exception that a caller would expect.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class RollflowError(Exception):
    """Raised when rollflow refuses something; the base of every class below."""


class GraphError(RollflowError, ValueError):
    """Raised when a graph can't run as drawn: an unknown port, a cycle, two types that don't meet."""


class ColumnError(RollflowError, ValueError):
    """Raised when an array does not fit its column's shape or dtype."""


class EpisodeError(RollflowError, AssertionError):
    """Raised when episode data does not fit together: lengths, ids, a step after the end."""


class EpisodeIndexError(RollflowError, IndexError):
    """Raised when an index lies outside an episode and its lookback."""


class ConnectorError(RollflowError, ValueError):
    """Raised when a connector piece can't take what it got, or gives what the next can't take."""


class ModuleError(RollflowError, ValueError):
    """Raised when a module lacks a method or an output, or its output is not a number."""


class EnvError(RollflowError, ValueError):
    """Raised when an environment can't be made, or breaks the contract of its own spaces."""


class LagError(RollflowError, RuntimeError):
    """Raised when a fragment is older, in policy versions, than a learner may see."""


class RunError(RollflowError, RuntimeError):
    """Raised when a run is used outside its life: before it began, after it ended, or twice."""


class MetricsError(RollflowError, ValueError):
    """Raised when a metric is logged in two ways, or with a value that is no number."""


class WireError(RollflowError, ValueError):
    """Raised when the other end of a wire breaks the protocol or refuses, or what is to be sent would break it.

    code    the same in a word, as in a `Refused` frame
    """

    def __init__(self, text: str, code: str = "message") -> None:
        super().__init__(text)
        self.code = code


@contextmanager
def noted(where: str) -> Iterator[None]:
    """Say in a note of whatever is raised where it happened."""
    try:
        yield
    except Exception as error:
        error.add_note(where)
        raise


@contextmanager
def located(where: str) -> Iterator[None]:
    """Say in front of an error's text where it happened."""
    try:
        yield
    except RollflowError as error:
        raise type(error)(f"{where}: {error}") from None
