"""Pieces of SVG and HTML, in the colours of a page that has a theme, and elsewhere in those of its text."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from math import isfinite
from operator import itemgetter
from typing import Any

import numpy as np

INK = "var(--color-foreground-primary, currentColor)"
FAINT = "var(--color-foreground-secondary, gray)"
PAPER = "var(--color-background-secondary, none)"
BORDER = "var(--color-foreground-border, silver)"
BRAND = "var(--color-brand-primary, steelblue)"
FILLS = {"busy": BRAND, "blocked": "var(--color-blocked, #d9822b)", "idle": "var(--color-idle, #8884)"}

WIDTH = 440
LINE = 17  # from one line of text to the next
_FONT = "var(--font-stack--monospace, monospace)"
_HEAD = (
    '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    f'<path d="M0 0 8 4 0 8z" fill="{FAINT}"/></marker>'
)


def picture(parts: Sequence[str], height: float, description: str, width: float = WIDTH) -> str:
    """A whole picture, which is as wide as the page if that is narrower."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="picture" role="img" aria-label="{escape(description)}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" '
        f'style="display: block; width: 100%; max-width: {1.2 * width:.0f}px; margin: 1rem 0" font-size="13" '
        f'font-family="{_FONT}"><defs>{_HEAD}</defs>{"".join(parts)}</svg>'
    )


def width_of(words: str) -> float:
    """Width that a line of text takes at most, in the font of a picture."""
    return 8.0 * sum(2 if ord(letter) > 0x2E7F else 1 for letter in words)


def text(x: float, y: float, words: str, *, anchor: str = "middle", weight: str = "normal") -> str:
    """A line of text."""
    shown = f'text-anchor="{anchor}" font-weight="{weight}" fill="{INK}"'
    return f'<text x="{x:.0f}" y="{y:.0f}" {shown}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, *, dashed: bool = False, is_marked: bool = False) -> str:
    """A rectangle; a frame around others is dashed, and empty."""
    fill = "none" if dashed else PAPER
    dashes = ' stroke-dasharray="4 3"' if dashed else ""
    stroke = f'stroke="{BRAND}" stroke-width="2"' if is_marked else f'stroke="{BORDER}"'
    size = f'x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}"'
    return f'<rect {size} rx="5" fill="{fill}" {stroke}{dashes}/>'


def bar(x: float, y: float, width: float, fill: str, height: float = 12) -> str:
    """A bar."""
    return f'<rect x="{x:.1f}" y="{y:.0f}" width="{width:.1f}" height="{height:.0f}" rx="2" fill="{fill}"/>'


def line(path: str, *, dashed: bool = False, headed: bool = True) -> str:
    """A line along a path, with a head at its end."""
    dashes = ' stroke-dasharray="5 4"' if dashed else ""
    head = ' marker-end="url(#head)"' if headed else ""
    return f'<path d="{path}" fill="none" stroke="{FAINT}" stroke-width="1.5"{dashes}{head}/>'


def plot(values: Sequence[float], description: str, *, width: int = 240, height: int = 40) -> str:
    """A whole picture of numbers as a line, from the first to the last one; one that is not finite is left out."""
    finite = [(at, value) for at, value in enumerate(values) if isfinite(value)]
    if not finite:
        return ""
    low, high = min(value for _, value in finite), max(value for _, value in finite)
    across, up = width / (len(values) - 1 or 1), (height - 4) / ((high - low) or 1.0)
    up_of = itemgetter(1)
    columns: dict[int, list[tuple[float, float]]] = {}  # of pixels: the lowest and the highest value of each is drawn
    for at, value in finite:
        columns.setdefault(int(at * across), []).append((at * across, height - 2 - (value - low) * up))
    drawn = [point for column in columns.values() for point in sorted({min(column, key=up_of), max(column, key=up_of)})]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in drawn)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(description)}" width="{width}" '
        f'height="{height}"><polyline points="{points}" fill="none" stroke="{BRAND}" stroke-width="1.5"/></svg>'
    )


def preformatted(words: str) -> str:
    """Text as it is, with its lines."""
    return f"<pre>{escape(words)}</pre>"


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table of texts, as the notebook lays tables out."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def array_table(title: str, columns: Mapping[str, Any], rewards: Any) -> str:
    """HTML of a title, a table and a plot.

    columns    name -> tree of arrays, or a list of items that are no array yet
    rewards    f32[T], or a list of T numbers
    """
    rows = [row for name, tree in columns.items() for row in _rows(name, tree)]
    values = np.asarray(rewards, np.float64).tolist()
    plotted = plot(values, "rewards")
    return f"{preformatted(title)}{table(('column', 'dtype', 'shape'), rows)}<div>rewards {plotted}</div>"


def _rows(name: str, tree: Any) -> Iterator[tuple[str, str, str]]:
    if isinstance(tree, Mapping):
        for key, part in tree.items():
            yield from _rows(f"{name}.{key}", part)
    elif isinstance(tree, tuple):
        for place, part in enumerate(tree):
            yield from _rows(f"{name}.{place}", part)
    elif isinstance(tree, list):
        yield name, "list", f"({len(tree)})"
    else:
        array = np.asarray(tree)
        yield name, str(array.dtype), str(array.shape)
