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
from rollflow.stream.snapshots.rates import diagnosis_to_show, is_bad, is_stalled, last_errors, title_of

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
    if "figures" in run:
        yield Text(figures_line(run["figures"], run["steps_per_s"]))
    for name, part in run.get("parts", {}).items():
        yield Text(f"{name}: {part['name']}: {figures_line(part['figures'], None)}")
    if sources := run.get("sources"):
        yield Text(f"fed by {', '.join(sources)}")
    if run["nodes"]:
        yield _stages(run)
    if any("held" in edge for edge in run["edges"]):
        yield _edges(run)
    if parties := _parties(run):
        yield Text(parties)
    yield from (Text(line, style="red") for line in last_errors(run))
    if "conclusion" in run:
        yield Text(run["conclusion"], style="bold")
    if text := diagnosis_to_show(run):
        yield Text(text, style="bold red" if is_stalled(run) else "")


def figures_line(figures: Mapping[str, float], steps_per_s: float | None) -> str:
    """Steps, return, versions, lag and losses, in words."""
    parts = [] if steps_per_s is None else [f"{steps_per_s:,.0f} steps/s"]
    parts.append(f"{figures.get('time/total_timesteps', 0):,.0f} steps")
    parts.append(f"{figures.get('time/iterations', 0):,.0f} updates")
    if "rollout/ep_rew_mean" in figures:
        parts.append(f"return {figures['rollout/ep_rew_mean']:,.4g}")
    for name, value in figures.items():
        if name.startswith("policy/version"):
            parts.append(f"version {value:,.0f}{_label(name, 'policy/version')}")
        elif name.startswith("rollout/ep_rew_mean/"):
            parts.append(f"return {value:,.4g}{_label(name, 'rollout/ep_rew_mean')}")
        elif name.startswith("lost/"):
            parts.append(f"lost {value:,.0f} ({name.removeprefix('lost/')})")
    if "policy/lag" in figures:
        parts.append(f"lag {figures['policy/lag']:,.0f}")
    return "   ".join(parts)


def _label(name: str, stem: str) -> str:
    label = name.removeprefix(stem).removeprefix("/")
    return f" ({label})" if label else ""


def _stages(run: Snapshot) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("", "stage"):
        table.add_column(heading, no_wrap=True)
    table.add_column("items/s", justify="right")
    table.add_column("busy")
    for heading in ("", "blocked", "p50", "p99", "longest"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("to", "slowest piece"):
        table.add_column(heading)
    marks, ways = _marks(run["tasks"]), _ways(run["edges"], run["tasks"])
    for name, node in run["nodes"].items():
        bar = _bar(node["busy"])
        cells = [f"{node[part]:.0%}" for part in ("busy", "blocked")]
        cells += [duration_text(node.get(f"{part}_s", "")) for part in ("p50", "p99", "longest")]
        style = "bold" if name == run["bottleneck"] else ""
        row = [Text(marks.get(name, " ")), Text(name), Text(f"{node['items_per_s']:,.1f}"), bar, *map(Text, cells)]
        table.add_row(*row, Text(ways.get(name, "")), Text(node.get("slowest_piece", "")), style=style)
    return table


def _bar(share: float) -> Text:
    """A bar as long as a share, from 0 to 1."""
    return Text(f"{'█' * round(_BAR * share):·<{_BAR}}")


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
            bar = _bar(edge["held"] / edge["capacity"])
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
