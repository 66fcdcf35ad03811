"""Progress of a run, for people: a line that changes in a terminal or a notebook, and elsewhere a line a minute."""

import importlib.util
import time
import weakref
from collections.abc import Callable
from typing import Any

from rollflow.nodes.logs.figures import Row, busiest_stage
from rollflow.stream.data.errors import MetricsError

_LINE_S = 60.0  # between two lines, where none can be written over
_WIDE = 110  # characters of a line that has room for a bar


class Progress:
    """Line with steps per second, mean return, policy version and the stage that holds the others back.

    target    "": there is nothing to name

    It goes to the standard error stream, by the package rich: to a file, or a pipe, as one line a minute. Raises
    MetricsError for a target.
    """

    def __init__(self, target: str) -> None:
        if target:
            raise MetricsError(f"log='progress:{target}' names a target, expected 'progress:'")
        self._console: Any = None
        self._bar: Any = None  # None: lines are written below each other
        self._task: Any = None
        self._stop: Callable[[], object] = bool
        self._next = 0.0  # time for the next line
        self._last: Row | None = None  # that was not written

    def open(self) -> None:
        """Begin the line."""
        self._console = importlib.import_module("rich.console").Console(stderr=True, highlight=False)
        is_notebook = self._console.is_jupyter and importlib.util.find_spec("ipywidgets") is not None
        if not is_notebook and (not self._console.is_terminal or self._console.is_dumb_terminal):
            return
        rich = importlib.import_module("rich.progress")
        whole = importlib.import_module("rich.table").Column(no_wrap=True, min_width=4)
        columns = [
            rich.MofNCompleteColumn(table_column=whole),
            rich.TimeElapsedColumn(table_column=whole),
            rich.TimeRemainingColumn(compact=True, table_column=whole),
            rich.TextColumn("{task.description}"),
        ]
        if self._console.width >= _WIDE:
            columns.insert(1, rich.BarColumn(bar_width=20))
        self._bar = rich.Progress(*columns, console=self._console, auto_refresh=False)
        self._task = self._bar.add_task("no step yet", total=None)
        self._bar.start()
        self._stop = weakref.finalize(self, self._bar.stop)  # shows the cursor again, also where nobody closes it

    def write(self, row: Row) -> None:
        """Show a row: at once, or, where lines can't be written over, after a minute."""
        if self._bar is not None:
            self._bar.update(
                self._task, completed=row.updates, total=row.of_updates, description=text_of(row), refresh=True
            )
            return
        self._last = row
        if time.monotonic() >= self._next:
            self._write_line()

    def close(self) -> None:
        """End with the last row."""
        if self._bar is not None:
            self._stop()
        elif self._last is not None:
            self._write_line()

    def _write_line(self) -> None:
        assert self._last is not None
        row, self._last = self._last, None
        of = "" if row.of_updates is None else f" of {row.of_updates:,}"
        self._console.print(f"{row.updates:,}{of} updates in {row.elapsed_s:,.0f} s: {text_of(row)}", soft_wrap=True)
        self._next = time.monotonic() + _LINE_S


def text_of(row: Row) -> str:
    """What is worth a person's look in a row, in words."""
    values = row.values
    parts = [f"{values.get('time/fps_now', 0.0):,.0f} steps/s"]
    if "rollout/ep_rew_mean" in values:
        parts.append(f"return {values['rollout/ep_rew_mean']:,.4g}")
    versions = sorted({int(value) for name, value in values.items() if name.startswith("policy/version")})
    if versions:
        parts.append(f"version {versions[0]}" if len(versions) == 1 else f"versions {versions[0]} to {versions[-1]}")
    stage = busiest_stage(values)
    if stage is not None:
        parts.append(f"{stage[0]} {stage[1]:.0%} busy")
    return ", ".join(parts)
