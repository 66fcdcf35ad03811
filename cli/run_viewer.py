"""The live view of `rollflow top`: pictures of runs in a terminal, and the keys that choose what is shown."""

import os
import re
import select
import sys
import time
import tty
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from rollflow.cli.call_times import measured_calls
from rollflow.cli.doctor import stack_report
from rollflow.cli.run_picture import picture
from rollflow.stream.data.system import system_module

termios = system_module("termios")

Runs = Sequence[Mapping[str, Any]]

_KEY = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|.", re.DOTALL)
_NAMES = {
    "\x1b[A": "up",
    "\x1b[B": "down",
    "k": "up",
    "j": "down",
    "\x1b[5~": "page up",
    "\x1b[6~": "page down",
    "\r": "enter",
    "\n": "enter",
    "\x1b": "escape",
}
_FOOTER = "q quit   ↑↓ scroll   enter next run   s stacks   c calls   esc all runs"


class Keys:
    """Keys that are pressed in the terminal of this process; none come where its input is no terminal."""

    def __enter__(self) -> Self:
        self._fd, self._pressed = (sys.stdin.fileno() if sys.stdin.isatty() else -1), deque[str]()
        if self._fd >= 0:
            self._before = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd)
        return self

    def __exit__(self, *error: object) -> None:
        if self._fd >= 0:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)

    def wait(self, seconds: float) -> str | None:
        """The next key, by its name; None where none is pressed in time."""
        if self._pressed:
            return self._pressed.popleft()
        if self._fd < 0:
            time.sleep(max(seconds, 0.0))
            return None
        if not select.select([self._fd], [], [], max(seconds, 0.0))[0]:
            return None
        read = os.read(self._fd, 1024).decode(errors="replace")
        self._pressed.extend(_NAMES.get(key, key) for key in _KEY.findall(read))
        return self.wait(0.0) if read else "q"  # nobody is there any more


class View:
    """What is shown of some runs, from which line on.

    folder    where runs are looked for
    asks      key -> what it asks the process of a run for, by the run's snapshot
    """

    def __init__(self, folder: str, asks: Mapping[str, Callable[[Mapping[str, Any]], RenderableType]]) -> None:
        self.runs: Runs = ()
        self._folder, self._asks = folder, asks
        self._chosen: str | None = None  # path of the one run that is shown; None: all are
        self._seen: RenderableType | None = None  # what its process was asked for
        self._first = self._page = 0  # the line at the top, and lines on a page

    def press(self, key: str) -> bool:
        """Take a key; False where it ends the view."""
        moves = {"up": -1, "down": 1, "page up": -self._page, "page down": self._page}
        if key in moves:
            self._first += moves[key]
        elif key == "escape":
            self._show(None)
        elif key == "enter" and self.runs:
            paths = [run["path"] for run in self.runs]
            self._show(paths[(paths.index(self._chosen) + 1) % len(paths)] if self._chosen in paths else paths[0])
        elif key in self._asks and self.runs:
            run = self._chosen_runs()[0]
            self._show(run["path"])
            try:
                self._seen = self._asks[key](run)
            except Exception as error:
                self._seen = Text(str(error), style="bold red")
        return key != "q"

    def _show(self, path: str | None) -> None:
        self._chosen, self._seen, self._first = path, None, 0

    def _chosen_runs(self) -> Runs:
        chosen = [run for run in self.runs if run["path"] == self._chosen]
        return chosen or self.runs

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        parts: list[RenderableType] = [picture(self._chosen_runs(), self._folder)]
        if self._seen is not None:
            parts.insert(0, self._seen)
        lines = console.render_lines(Group(*parts), options.update(height=None), pad=False)
        self._page = max(1, console.height - 1)
        self._first = max(0, min(self._first, len(lines) - self._page))
        last = min(self._first + self._page, len(lines))
        for line in lines[self._first : last]:
            yield from line
            yield Segment.line()
        where = "" if len(lines) <= self._page else f"   {self._first + 1}-{last} of {len(lines)}"
        yield Text(f"{_FOOTER}{where}", style="reverse", no_wrap=True, overflow="crop", end="")


def stacks(run: Mapping[str, Any]) -> RenderableType:
    """Where the threads of a run's process stand."""
    return Text("\n".join(stack_report(run["pid"])))


def calls(run: Mapping[str, Any]) -> RenderableType:
    """How long its calls take."""
    return measured_calls(run["path"])


ASKS = {"s": stacks, "c": calls}
"""What the process of a run on this machine is asked for, by key."""


def show_live(look: Callable[[], Runs], every: float, view: View) -> None:
    """Show runs in the terminal, looked at every so many seconds, until a key ends it."""
    with Keys() as keys, Live(screen=True, auto_refresh=False) as live:
        goes_on, due = True, time.monotonic()
        while goes_on:
            if time.monotonic() >= due:
                view.runs, due = look(), time.monotonic() + every
            live.update(view, refresh=True)
            key = keys.wait(due - time.monotonic())
            goes_on = key is None or view.press(key)
