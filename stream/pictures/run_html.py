"""HTML of a run: the graph with busy shares, figures, and what holds it back."""

from collections.abc import Mapping
from typing import Any

from rollflow.stream.pictures.graph_picture import graph_picture
from rollflow.stream.pictures.html import preformatted, table


def run_html(title: str, snapshot: Mapping[str, Any]) -> str:
    """A title, and what a snapshot of the run has beside it; of a run that has not begun the title alone."""
    parts = [preformatted(title)]
    if "tasks" in snapshot:
        parts += [graph_picture(snapshot, snapshot["conclusion"]), preformatted(snapshot["conclusion"])]
        parts += [figures_table(snapshot.get("figures", {}))]
    return "".join(parts)


def figures_table(figures: Mapping[str, float]) -> str:
    """Names and values; nothing where there are none."""
    rows = [(name, f"{value:,.6g}") for name, value in figures.items()]
    return table(("figure", "value"), rows) if rows else ""
