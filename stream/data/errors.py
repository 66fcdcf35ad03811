"""Every error that rollflow raises on purpose.

There are two families: *something does not fit* (a graph, a column, an episode, a piece) and *something broke while
running*. The first is raised before anything runs, if possible. Each class is also the built-in exception that a
caller would expect.
"""

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import numpy as np

SEE = "see docs/"  # begins a line that names a page

HELP_PAGES = {
    "environment": "how_to/environments.md#what-env-may-be",
    "autoreset": "how_to/environments.md#vector-environments",
    "spaces": "how_to/environments.md#spaces",
    "flags": "how_to/environments.md#what-step-gives",
    "module": "how_to/modules.md#outputs",
    "device": "how_to/on_a_device.md#pieces-that-need-the-host",
    "distribution": "how_to/modules.md#distributions-for-each-action-space",
    "memory": "how_to/modules.md#a-recurrent-policy",
    "not a number": "how_to/debug.md#read-an-error",
    "saved run": "how_to/save_and_go_on.md#when-a-checkpoint-is-refused",
    "recorded run": "how_to/save_and_go_on.md#record-and-replay",
    "state of environments": "how_to/save_and_go_on.md#what-environments-can-say",
    "weights": "how_to/save_and_go_on.md#when-weights-do-not-fit",
    "piece": "tutorials/connectors.md#write-a-piece-for-observations",
    "state": "tutorials/connectors.md#a-piece-that-learns",
    "edit": "tutorials/connectors.md#edit-a-pipeline",
    "lookback": "tutorials/connectors.md#how-far-a-piece-looks-back",
    "worker": "tutorials/several_processes.md#when-a-worker-is-lost",
    "pickle": "tutorials/several_processes.md#what-goes-to-a-worker",
    "timeout": "tutorials/several_processes.md#timeouts",
    "hosts": "tutorials/remote_hosts.md#when-a-connection-breaks",
    "started hosts": "how_to/start_hosts.md#when-hosts-do-not-come",
    "trainer away": "tutorials/trainer_elsewhere.md#when-the-trainer-is-away",
    "checkpoint": "how_to/save_and_go_on.md#with-a-trainer-elsewhere",
    "lag": "explanation/freshness.md#a-bound",
    "stall": "how_to/find_what_holds_back.md#when-it-stands-still",
    "graph": "how_to/graphs.md#look-before-it-runs",
    "node": "how_to/graphs.md#nodes",
    "interrupted": "how_to/debug.md#press-ctrl-c",
    "agents": "how_to/several_agents.md#which-agent-has-which-policy",
    "replay": "how_to/replay.md#when-it-refuses",
    "dataset": "how_to/datasets.md#when-it-refuses",
    "policy": "how_to/deploy_a_policy.md#when-a-policy-is-refused",
    "secret": "how_to/secure_connections.md#a-secret",
    "tls": "how_to/secure_connections.md#tls",
}
"""Topic of an error -> the page of the documentation that helps, and the heading on it."""


def page_on(topic: str) -> str:
    """The words that name the page for a topic of `HELP_PAGES`: `see docs/…`."""
    return f"{SEE}{HELP_PAGES[topic]}"


class RollflowError(Exception):
    """Raised when rollflow refuses something; the base of every class below."""

    def see(self, topic: str) -> Self:
        """Name the page for a topic of `HELP_PAGES`, on the last line that a traceback shows; returns the error."""
        self.add_note(page_on(topic))
        return self

    @property
    def pages(self) -> list[str]:
        """The notes that name a page: `see docs/…`."""
        return [note for note in getattr(self, "__notes__", ()) if note.startswith(SEE)]

    def add_note(self, note: str, /) -> None:
        """Add a note before the one that names a page."""
        super().add_note(note)
        self.__notes__.sort(key=lambda each: each.startswith(SEE))


_INNER = "rollflow.", "contextlib"  # which runs the context managers of rollflow


def warn_caller(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn, at the line of the innermost caller outside of rollflow."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(_INNER):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def more_than_one(name: str, shape: Sequence[int], expected: Sequence[int]) -> str:
    """The text of the error for values of another shape than the expected, which has one number for each step."""
    return (
        f"'{name}' has shape {list(shape)}, expected {list(expected)}: one number for each step, as squeeze(-1) gives"
    )


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


class StateError(ConnectorError):
    """Raised when a piece's state can't be saved, sent or merged, since the piece lacks a method for that."""


class ModuleError(RollflowError, ValueError):
    """Raised when a module lacks a method or an output, or its output is not a number.

    nan_slots    of a lane, whose output is NaN
    """

    nan_slots: Sequence[int] = ()


class PolicyError(RollflowError, ValueError):
    """Raised when a policy can't be saved or loaded, or a session of it can't go on."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.see("policy")


class CheckpointError(RollflowError, ValueError):
    """Raised when a run can't be saved, or what is to be gone on from is no checkpoint of one, or is damaged."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.see("saved run")


class EnvError(RollflowError, ValueError):
    """Raised when an environment can't be made, or breaks the contract of its own spaces."""


class LagError(RollflowError, RuntimeError):
    """Raised when a fragment is older, in policy versions, than a learner may see."""


class RunError(RollflowError, RuntimeError):
    """Raised when a run is used outside its life: before it began, after it ended, or twice.

    episode    that a replay has stopped at; None: it was not that
    """

    episode: Any = None


class StallError(RunError):
    """Raised when a run has stood still for longer than `stall_after`, with `on_stall="raise"`."""


class ReplayError(RollflowError, ValueError):
    """Raised when a replay can't hold what it is given, or can't be sampled as asked."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.see("replay")


class DatasetError(RollflowError, ValueError):
    """Raised when a dataset can't be written or read, or is of another kind than what is written to it."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.see("dataset")


class MetricsError(RollflowError, ValueError):
    """Raised when a metric is logged in two ways, or with a value that is no number."""


class WireError(RollflowError, ValueError):
    """Raised when the other end of a connection breaks the protocol or refuses, or a message to it would break it.

    code    the reason in one word, as in a `Refused` frame
    """

    def __init__(self, text: str, code: str = "message") -> None:
        super().__init__(text)
        self.code = code
        if code in ("secret", "tls"):
            self.see(code)


_MOST_PARTS = 6  # of a dict, list or tuple that are shown
_MOST_DEPTH = 3  # to which those inside each other are shown
_MOST_LETTERS = 100  # of anything else
_MOST_IN_ALL = 200  # letters


def shown(value: Any) -> str:
    """A value for an error's text, short and on one line: arrays by dtype and shape, trees by their parts, no data."""
    if isinstance(value, np.ndarray):
        return f"an array {_shown(value)}"
    text = f"a {_shown(value)}" if _is_tensor(value) else _shown(value)
    return text if len(text) <= _MOST_IN_ALL else f"{text[:_MOST_IN_ALL]}…"


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "__array__") and not isinstance(value, np.generic | type)


def _shown(value: Any, depth: int = 0) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    if _is_tensor(value):
        dtype, shape = str(getattr(value, "dtype", "")), getattr(value, "shape", ())
        return f"{type(value).__name__} {dtype.removeprefix('torch.')}{list(shape)}"
    if type(value) in (dict, list, tuple):
        return _shown_parts(value, depth)
    try:
        text = repr(value[:_MOST_LETTERS]) if isinstance(value, str | bytes) else " ".join(repr(value).split())
    except Exception:  # an object of others' may raise anything there
        text = object.__repr__(value)
    if "array(" in text or "tensor(" in text:
        return f"a {type(value).__name__}"
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}…"


def _shown_parts(value: Any, depth: int) -> str:
    """A dict, list or tuple, with its first parts."""
    begin, end = ("{", "}") if type(value) is dict else ("[", "]") if type(value) is list else ("(", ")")
    if depth == _MOST_DEPTH:  # it may contain itself
        return f"{begin}…{end}" if value else begin + end
    first = list(value)[:_MOST_PARTS]
    parts = [_shown(part, depth + 1) for part in first]
    if type(value) is dict:
        parts = [f"{key}: {_shown(value[each], depth + 1)}" for key, each in zip(parts, first, strict=True)]
    more = f", … ({len(value)} in all)" if len(value) > len(parts) else "," if begin == "(" and len(value) == 1 else ""
    return f"{begin}{', '.join(parts)}{more}{end}"


def error_text(error: Exception) -> str:
    """The text of an error for whoever is refused by it: of one that is not rollflow's, with its type."""
    return str(error) if isinstance(error, RollflowError) else f"{type(error).__name__}: {error}"


def described(error: Exception) -> str:
    """An error on one line: its type and text, its notes, and the errors of a group."""
    parts = error.exceptions if isinstance(error, ExceptionGroup) else ()
    return "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ()), *map(described, parts)])


def error_field(error: Exception) -> str:
    """The same as a field of a message: at most 4096 characters, all of which UTF-8 has."""
    return error_text(error)[:4096].encode(errors="replace").decode()


@contextmanager
def noted(where: str) -> Iterator[None]:
    """Add the note `where` to any exception raised in the block."""
    try:
        yield
    except Exception as error:
        error.add_note(where)
        raise


_LONG = ("torch", "safetensors", "onnxruntime")


@contextmanager
def refused(text: str, expected: str = "", *, error: type[RollflowError] = PolicyError) -> Iterator[None]:
    """Raise an error with a text and that of any exception of another kind raised in the block.

    Of torch's, safetensors' and onnxruntime's, which are long, the first line is taken.
    """
    try:
        yield
    except error:
        raise
    except Exception as other:  # theirs have no common base; many of torch's are a RuntimeError
        reason = str(other).strip()
        is_long = isinstance(other, RuntimeError) or type(other).__module__.startswith(_LONG)
        if is_long and not isinstance(other, RollflowError):
            reason = reason.split("\n")[0][:200]
        raise error(f"{text}: {type(other).__name__}: {reason}{expected}") from other


@contextmanager
def located(where: str) -> Iterator[None]:
    """Put `where` before the text of any RollflowError raised in the block."""
    try:
        yield
    except RollflowError as error:
        placed = type(error)(f"{where}: {error}")
        placed.__notes__ = getattr(error, "__notes__", [])
        raise placed from None
