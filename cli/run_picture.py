"""Pictures of runs for a terminal: a panel for each, by the package rich."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rollflow.stream.graph.report import duration_text
from rollflow.stream.observe.snapshot import Snapshot, shown

_BAR = 8  # characters
_MOST_CALLS = 8


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
    found = shown(run)
    place = f"pid {run['pid']}"
    if "began" in run:
        place += f"  {run['command']}  {run['time'] - run['began']:,.0f} s"
    if run.get("memory_bytes"):
        place += f"  {run['memory_bytes'] / 2**20:,.0f} MiB"
    return Panel(
        Group(*_body(run, found)),
        title=Text(found["title"]),
        title_align="left",
        subtitle=Text(place),
        subtitle_align="left",
        border_style="red" if found["is_bad"] else "none",
    )


def _body(run: Snapshot, found: Snapshot) -> Iterator[RenderableType]:
    style = "bold red" if found["is_bad"] else ""
    if found["sentence"]:
        yield Text(found["sentence"], style=style or "bold")
    yield from (Text(text, style="red" if text in found["errors"] else style) for text in found["texts"])
    if found["tiles"]:
        yield Text(figures_line(found["tiles"]))
    if run["nodes"]:
        yield Text()
        yield _stages(run)
        pieces = {name: node["slowest_piece"] for name, node in run["nodes"].items() if "slowest_piece" in node}
        yield from (Text(f"slowest piece of {name}: {piece}") for name, piece in pieces.items())
    if any("held" in edge for edge in run["edges"]):
        yield _edges(run)
    calls = sorted((each for each in run.get("parties", ()) if each["kind"] == "call"), key=lambda it: -it["age_s"])
    yield from (Text(f"{each['name']} {each['doing']} since {each['age_s']:.1f} s") for each in calls[:_MOST_CALLS])
    if len(calls) > _MOST_CALLS:
        yield Text(f"and {len(calls) - _MOST_CALLS} more")


def figures_line(tiles: Iterable[tuple[str, float]]) -> str:
    """The main figures of a run, in words."""
    return "   ".join(f"{name} {value:,{'.4g' if abs(value) < 1e4 else '.0f'}}" for name, value in tiles)


def _stages(run: Snapshot) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("stage", no_wrap=True)
    for heading in ("items/s", "busy", "blocked", "p50", "p99", "longest"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("to")
    for name, node in run["nodes"].items():
        cells = [f"{node['items_per_s']:,.1f}", *(f"{node[part]:.0%}" for part in ("busy", "blocked"))]
        cells += [duration_text(node.get(f"{part}_s", "")) for part in ("p50", "p99", "longest")]
        targets = (f"{each['target']}{' ↺' * each['feedback']}" for each in run["edges"] if each["source"] == name)
        style = "bold" if name == run["bottleneck"] else ""
        table.add_row(*map(Text, [name, *cells, ", ".join(targets)]), style=style)
    return table


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
