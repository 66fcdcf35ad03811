"""Pictures of runs for a terminal: a panel for each, by the package rich."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rollflow.stream.graph.report import duration_text
from rollflow.stream.observe.snapshot import is_bad, last_errors, main_figures, stall_text, title_of

Snapshot = Mapping[str, Any]

_BAR = 8  # characters
_MOST_PARTIES = 8


def show(look: Callable[[], Sequence[Snapshot]], folder: str, every: float | None) -> None:
    """Show runs in the terminal, looked at every so many seconds, until Ctrl-C; None: print them once."""
    if every is None:
        Console().print(picture(look(), folder))
        return
    with Live(screen=True, auto_refresh=False) as live:
        while True:
            live.update(picture(look(), folder), refresh=True)
            time.sleep(every)


def picture(runs: Sequence[Snapshot], folder: str) -> RenderableType:
    """All runs, one below the other."""
    if not runs:
        return Text(f"no run of this user on this machine has a socket in {folder}")
    return Group(*map(_panel, runs))


def _panel(run: Snapshot) -> Panel:
    place = f"pid {run['pid']}"
    if "began" in run:
        place += f"  {run['command']}  {run['time'] - run['began']:,.0f} s"
    if run.get("memory_bytes"):
        place += f"  {run['memory_bytes'] / 2**20:,.0f} MiB"
    return Panel(
        Group(*_body(run)),
        title=Text(title_of(run)),
        title_align="left",
        subtitle=Text(place),
        subtitle_align="left",
        border_style="red" if is_bad(run) else "none",
    )


def _body(run: Snapshot) -> Iterator[RenderableType]:
    if "error" in run:
        yield Text(run["error"], style="bold red")
        return
    if "conclusion" in run:
        yield Text(run["conclusion"], style="bold")
    if text := stall_text(run):
        yield Text(text, style="bold red")
    if "figures" in run:
        yield Text(figures_line(run))
    for name, part in run.get("parts", {}).items():
        yield Text(f"{name}: {part['name']}: {figures_line(part)}")
    if sources := run.get("sources"):
        yield Text(f"fed by {', '.join(sources)}")
    if run["nodes"]:
        yield Text()
        yield _stages(run)
        if pieces := _slowest_pieces(run):
            yield Text(pieces)
    if any("held" in edge for edge in run["edges"]):
        yield _edges(run)
    if parties := _parties(run):
        yield Text(parties)
    yield from (Text(line, style="red") for line in last_errors(run))


def figures_line(run: Snapshot) -> str:
    """The main figures of a run, in words."""
    return "   ".join(f"{name} {value:,{'.4g' if abs(value) < 1e4 else '.0f'}}" for name, value in main_figures(run))


def _stages(run: Snapshot) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    table.add_column("stage", no_wrap=True)
    for heading in ("items/s", "busy", "blocked", "p50", "p99", "longest"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("to")
    marks, ways = _marks(run["tasks"]), _ways(run["edges"], run["tasks"])
    for name, node in run["nodes"].items():
        cells = [f"{node['items_per_s']:,.1f}", *(f"{node[part]:.0%}" for part in ("busy", "blocked"))]
        cells += [duration_text(node.get(f"{part}_s", "")) for part in ("p50", "p99", "longest")]
        style = "bold" if name == run["bottleneck"] else ""
        table.add_row(marks.get(name, " "), Text(name), *map(Text, cells), Text(ways.get(name, "")), style=style)
    return table


def _slowest_pieces(run: Snapshot) -> str:
    """The slowest piece of each stage that runs some, a line each."""
    found = {name: node["slowest_piece"] for name, node in run["nodes"].items() if "slowest_piece" in node}
    return "\n".join(f"slowest piece of {name}: {piece}" for name, piece in found.items())


def _marks(tasks: Sequence[Sequence[str]]) -> dict[str, str]:
    """Node -> a bracket beside the nodes of one task, from the first to the last one."""
    marks: dict[str, str] = {}
    for names in tasks:
        if len(names) > 1:
            marks |= dict.fromkeys(names, "│") | {names[0]: "┌", names[-1]: "└"}
    return marks


def _ways(edges: Iterable[Snapshot], tasks: Sequence[Sequence[str]]) -> dict[str, str]:
    """Node -> where its items go, but for the next node of its task, which stands below it."""
    below = {pair for names in tasks for pair in pairwise(names)}
    ways: dict[str, list[str]] = {}
    for edge in edges:
        if (edge["source"], edge["target"]) in below:
            continue
        ways.setdefault(edge["source"], []).append(f"{edge['target']}{' ↺' if edge['feedback'] else ''}")
    return {name: ", ".join(targets) for name, targets in ways.items()}


def _edges(run: Snapshot) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("edge", "held", "", "items/s", "full", "dropped"):
        table.add_column(heading, justify="left" if heading in ("edge", "") else "right")
    for edge in run["edges"]:
        if "held" in edge:
            bar = Text(f"{'█' * round(_BAR * edge['held'] / edge['capacity']):·<{_BAR}}")
            name, held = f"{edge['source']} → {edge['target']}", f"{edge['held']}/{edge['capacity']}"
            rest = [f"{edge['items_per_s']:,.1f}", f"{edge['full']:.0%}", f"{edge['dropped']:,}"]
            table.add_row(Text(name), Text(held), bar, *map(Text, rest))
    return table


def _parties(run: Snapshot) -> str:
    """Lines of what is in a call, or waited for, longest first."""
    found = sorted(run.get("parties", ()), key=lambda party: -party["age_s"])
    lines = [f"{each['name']} {each['doing']} since {each['age_s']:.1f} s" for each in found if each["kind"] == "call"]
    more = [f"and {len(lines) - _MOST_PARTIES} more"] if len(lines) > _MOST_PARTIES else []
    return "\n".join([*lines[:_MOST_PARTIES], *more])
