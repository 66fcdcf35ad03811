"""Pieces of SVG, in the colours of a page that has a theme, and elsewhere in those of its text."""

from collections.abc import Sequence
from html import escape
from math import isfinite
from textwrap import wrap

INK = "var(--color-foreground-primary, currentColor)"
FAINT = "var(--color-foreground-secondary, gray)"
PAPER = "var(--color-background-secondary, none)"
BORDER = "var(--color-foreground-border, silver)"
BRAND = "var(--color-brand-primary, steelblue)"

WIDTH = 440
LINE = 17  # from one line of text to the next
_FONT = "var(--font-stack, sans-serif)"
_HEAD = (
    '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    f'<path d="M0 0 8 4 0 8z" fill="{FAINT}"/></marker>'
)


def picture(parts: list[str], height: float, description: str) -> str:
    """A whole picture, which is as wide as the page where that is narrower."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="picture" role="img" aria-label="{escape(description)}" '
        f'viewBox="0 0 {WIDTH} {height:.0f}" '
        f'style="display: block; width: 100%; max-width: {1.4 * WIDTH:.0f}px; margin: 1rem 0" font-size="13" '
        f'font-family="{_FONT}"><defs>{_HEAD}</defs>{"".join(parts)}</svg>'
    )


def text(x: float, y: float, words: str, *, anchor: str = "middle", weight: str = "normal") -> str:
    """A line of text."""
    shown = f'text-anchor="{anchor}" font-weight="{weight}" fill="{INK}"'
    return f'<text x="{x:.0f}" y="{y:.0f}" {shown}>{escape(words)}</text>'


def paragraph(x: float, y: float, words: str, letters: int) -> tuple[str, float]:
    """Lines of text of at most so many letters, and where the next line would be."""
    lines = wrap(words, letters)
    return "".join(text(x, y + LINE * number, line) for number, line in enumerate(lines)), y + LINE * len(lines)


def box(x: float, y: float, width: float, height: float, *, dashed: bool = False) -> str:
    """A rectangle; a frame around others is dashed, and empty."""
    fill = "none" if dashed else PAPER
    dashes = ' stroke-dasharray="4 3"' if dashed else ""
    size = f'x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}"'
    return f'<rect {size} rx="5" fill="{fill}" stroke="{BORDER}"{dashes}/>'


def bar(x: float, y: float, width: float, *, is_ours: bool) -> str:
    """A bar of a plot."""
    fill = BRAND if is_ours else BORDER
    return f'<rect x="{x:.1f}" y="{y:.0f}" width="{width:.1f}" height="12" rx="2" fill="{fill}"/>'


def line(path: str, *, dashed: bool = False, headed: bool = True) -> str:
    """A line along a path, with a head at its end."""
    dashes = ' stroke-dasharray="5 4"' if dashed else ""
    head = ' marker-end="url(#head)"' if headed else ""
    return f'<path d="{path}" fill="none" stroke="{FAINT}" stroke-width="1.5"{dashes}{head}/>'


def shape(x: float, y: float, path: str, name: str) -> str:
    """A filled path from a place on, which says its name under the mouse."""
    place = f'transform="translate({x:.0f} {y:.0f})"'
    return f'<path {place} d="{path}" fill="{BRAND}" fill-opacity="0.6"><title>{escape(name)}</title></path>'


def filled(x: float, y: float, width: float, height: float) -> str:
    """A pale rectangle behind text, for a share."""
    size = f'x="{x:.0f}" y="{y:.0f}" width="{width:.1f}" height="{height:.0f}"'
    return f'<rect {size} rx="5" fill="{BRAND}" fill-opacity="0.3"/>'


def plot(
    values: Sequence[float],
    description: str,
    *,
    times: Sequence[float] | None = None,
    width: int = 240,
    height: int = 40,
) -> str:
    """A whole picture of numbers as a line, from the first to the last one; one that is not finite is left out.

    times    of the values, in seconds, ascending; None: they are evenly spaced
    """
    places = range(len(values)) if times is None else times
    finite = [(at - places[0], value) for at, value in zip(places, values, strict=True) if isfinite(value)]
    if not finite:
        return ""
    low, high = min(value for _, value in finite), max(value for _, value in finite)
    across, up = width / ((places[-1] - places[0]) or 1.0), (height - 4) / ((high - low) or 1.0)
    drawn = thinned([(at * across, height - 2 - (value - low) * up) for at, value in finite])
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in drawn)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(description)}" width="{width}" '
        f'height="{height}"><polyline points="{points}" fill="none" stroke="{BRAND}" stroke-width="1.5"/></svg>'
    )


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points (x, y) with at most two for each pixel of the width: the lowest and the highest, in their order.

    points    by ascending x, in pixels
    """
    columns: dict[int, list[tuple[float, float]]] = {}
    for point in points:
        columns.setdefault(int(point[0]), []).append(point)
    return [point for column in columns.values() for point in _extremes(column)]


def _extremes(column: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    if len(column) <= 2:
        return column
    low, high = min(column, key=lambda point: point[1]), max(column, key=lambda point: point[1])
    return sorted((low, high))
