"""Options of what a run writes: a log, with where to, how often and by which x axis, and a trace."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import get_args

from rollflow.nodes.logs.destinations import Destination, destination_of, place_of
from rollflow.nodes.logs.figures import Axis
from rollflow.stream.data.errors import MetricsError
from rollflow.stream.traces.trace import check_trace

Log = str | Sequence[str] | None


@dataclass(frozen=True, slots=True)
class LogOptions:
    """Options of a run's log, and of its trace; see `Rollout`, whose keywords they are.

    log           one destination as KIND:TARGET, or several; None: none
    every         `log_every`: seconds between two rows, at least
    axis          `log_x`: "steps", "updates" or "time", in whole seconds
    of_updates    updates after which the run ends; None: nobody knows
    trace         file for a trace; None: none is written

    Raises MetricsError, a ValueError, for what can't be logged to: an unknown kind, a package that is missing, or a
    path that can't be written.
    """

    log: Log = None
    every: float = 1.0
    axis: Axis = "steps"
    of_updates: int | None = None
    trace: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        every = self.every
        if isinstance(every, bool) or not isinstance(every, int | float) or not 0 < every < math.inf:
            raise MetricsError(f"log_every is {every!r}, expected a number of seconds above 0")
        if self.axis not in get_args(Axis):
            raise MetricsError(f"log_x is {self.axis!r}, expected {', '.join(map(repr, get_args(Axis)))}")
        if self.log is not None and not isinstance(self.log, str | list | tuple):
            raise MetricsError(f"log is {self.log!r}, expected a text such as 'csv:run.csv', or a list of them")
        check_trace(self.trace)
        self.made()
        places = [place_of(text) for text in self.texts]
        if twice := [text for text, place in zip(self.texts, places, strict=True) if places.count(place) > 1]:
            raise MetricsError(f"log has {twice[0]!r} and {twice[1]!r}, expected each place once")

    @property
    def texts(self) -> list[str]:
        """The destinations, as they were given."""
        return [] if self.log is None else [self.log] if isinstance(self.log, str) else list(self.log)

    def made(self) -> list[Destination]:
        """The destinations, not opened yet."""
        return [destination_of(text) for text in self.texts]
