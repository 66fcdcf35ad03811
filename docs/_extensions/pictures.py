"""Directives that draw: a graph as it runs, messages between two sides, and the figures of a page's table.

```{graph-picture} what it shows
a program that leaves a graph in the name `graph`
```

```{messages} what it shows
rollout | trainer
rollout > trainer: a message
trainer: what it does
---: what happens to both
```

```{figures} what it shows
:table: heading that the table stands under
:beside: words in the column `beside` of the rows that are drawn
```
"""

import re
from collections.abc import Callable
from pathlib import Path
from textwrap import wrap
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from rollflow.stream.graph.drawing import shape
from rollflow.stream.observe import svg
from rollflow.stream.observe.graph_picture import graph_parts

_SIDES = (110, 330)  # where the two sides stand


class Drawing(SphinxDirective):
    """A directive whose one argument says what the picture shows, for readers who can't see it."""

    required_arguments = 1
    final_argument_whitespace = True
    has_content = True
    draw: Callable[..., Any]  # parts, height, and the width if it is another than usual

    def run(self) -> list[nodes.Node]:
        self.env.note_dependency(__file__)
        try:
            parts, height, *width = self.draw()
        except Exception as error:
            raise self.error(f"{self.name} can't be drawn: {type(error).__name__}: {error}") from error
        return [nodes.raw("", svg.picture(parts, height, self.arguments[0], *width), format="html")]


class GraphPicture(Drawing):
    """Draws the graph that a program makes: nodes of one task in one frame, and edges with their bounds."""

    def draw(self) -> tuple[list[str], float, float]:
        names: dict[str, Any] = {}
        exec("\n".join(self.content), names)
        return graph_parts(shape(names["graph"]))


class Messages(Drawing):
    """Draws what two sides send each other, from top to bottom."""

    def draw(self) -> tuple[list[str], float]:
        return message_parts(list(self.content))


class Figures(Drawing):
    """Draws two bars for each row of a table that names another engine, or a loop, beside rollflow."""

    option_spec: ClassVar = {"table": directives.unchanged_required, "beside": directives.unchanged_required}

    def draw(self) -> tuple[list[str], float]:
        source = Path(self.env.doc2path(self.env.docname)).read_text()
        return figure_parts(rows_under(source, self.options["table"]), self.options["beside"])


def message_parts(lines: list[str]) -> tuple[list[str], float]:
    """Messages and notes of two sides, in order; the first line names the sides."""
    names = [name.strip() for name in lines[0].split("|")]
    place = dict(zip(names, _SIDES, strict=True))
    parts, y = [], 56.0
    for entry in lines[1:]:
        who, _, words = (each.strip() for each in entry.partition(":"))
        if who == "---":
            parts += [svg.line(f"M10 {y}H{svg.WIDTH - 10}", dashed=True, headed=False)]
            shown, y = paragraph(svg.WIDTH / 2, y + 18, words, 56)
            parts, y = [*parts, shown], y + 8
        elif ">" in who:
            begin, end = (place[each.strip()] for each in who.split(">"))
            shown, below = paragraph(svg.WIDTH / 2, y, words, 30)
            parts += [shown, svg.line(f"M{begin} {below - 8}H{end}")]
            y = below + 18
        else:
            lines_of_it, below = paragraph(place[who], y + 4, words, 28)
            parts += [svg.box(place[who] - 100, y - 12, 200, below - y + 4), lines_of_it]
            y = below + 18
    heads = [svg.text(x, 20, name, weight="bold") for name, x in place.items()]
    poles = [svg.line(f"M{x} 28V{y - 14:.0f}", headed=False) for x in _SIDES]
    return [*poles, *heads, *parts], y


def paragraph(x: float, y: float, words: str, letters: int) -> tuple[str, float]:
    """Lines of text of at most so many letters, and where the next line would be."""
    lines = wrap(words, letters)
    shown = "".join(svg.text(x, y + svg.LINE * number, line) for number, line in enumerate(lines))
    return shown, y + svg.LINE * len(lines)


def rows_under(source: str, heading: str) -> list[dict[str, str]]:
    """Rows of the first table under a heading; an empty cell has what stands above it."""
    section = re.split(rf"^#+ {re.escape(heading)}$", source, maxsplit=1, flags=re.MULTILINE)[1]
    [table] = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)[:1]
    cells = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()]
    above, rows = [""] * len(cells[0]), []
    for row in cells[2:]:
        above = [now or before for now, before in zip(row, above, strict=True)]
        rows.append(dict(zip(cells[0], above, strict=True)))
    return rows


def figure_parts(rows: list[dict[str, str]], beside: str) -> tuple[list[str], float]:
    """Two bars a row, as long as the steps per second are; rows have scales of their own, since workloads differ."""
    parts, y = [], 16.0
    drawn = [row for row in rows if re.search(beside, row["beside"])]
    if not drawn:
        raise ValueError(f"no row has {beside!r} beside rollflow")
    for row in drawn:
        workload = re.sub(r"[`†]", "", row["workload"]).strip()
        parts += [svg.text(0, y, f"{workload}, {row['slots']} slots", anchor="start", weight="bold")]
        ours, theirs = (int(row[name].replace(",", "")) for name in ("rollflow, steps/s", "steps/s"))
        for name, figure in (("rollflow", ours), (row["beside"].replace("`", "").split(",")[0], theirs)):
            shown = f"{name}: {figure:,}"
            length = 160 * figure / max(ours, theirs)
            parts += [svg.bar(0, y + 9, length, svg.BRAND if name == "rollflow" else svg.BORDER)]
            parts += [svg.text(length + 6, y + 19, shown, anchor="start")]
            y += svg.LINE
        y += 30
    return parts, y - 12


def setup(app: Sphinx) -> dict[str, Any]:
    """Add the directives."""
    for name, directive in (("graph-picture", GraphPicture), ("messages", Messages), ("figures", Figures)):
        app.add_directive(name, directive)
    return {"parallel_read_safe": True}
