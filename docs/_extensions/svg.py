"""Pieces of SVG, in the colours of the theme: a picture follows the reader's choice of light or dark."""

from html import escape
from textwrap import wrap

WIDTH = 440
LINE = 17  # from one line of text to the next
_HEAD = (
    '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0 8 4 0 8z" fill="var(--color-foreground-secondary)"/></marker>'
)


def picture(parts: list[str], height: float, description: str) -> str:
    """A whole picture, which is as wide as the page where that is narrower."""
    return (
        f'<svg class="picture" role="img" aria-label="{escape(description)}" viewBox="0 0 {WIDTH} {height:.0f}" '
        f'style="display: block; width: 100%; max-width: {1.4 * WIDTH:.0f}px; margin: 1rem 0" font-size="13" '
        f'font-family="var(--font-stack)"><defs>{_HEAD}</defs>{"".join(parts)}</svg>'
    )


def text(x: float, y: float, words: str, *, anchor: str = "middle", weight: str = "normal") -> str:
    """A line of text."""
    shown = f'text-anchor="{anchor}" font-weight="{weight}" fill="var(--color-foreground-primary)"'
    return f'<text x="{x:.0f}" y="{y:.0f}" {shown}>{escape(words)}</text>'


def paragraph(x: float, y: float, words: str, letters: int) -> tuple[str, float]:
    """Lines of text of at most so many letters, and where the next line would be."""
    lines = wrap(words, letters)
    return "".join(text(x, y + LINE * number, line) for number, line in enumerate(lines)), y + LINE * len(lines)


def box(x: float, y: float, width: float, height: float, *, dashed: bool = False) -> str:
    """A rectangle; a frame around others is dashed, and empty."""
    fill = "none" if dashed else "var(--color-background-secondary)"
    dashes = ' stroke-dasharray="4 3"' if dashed else ""
    size = f'x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}"'
    return f'<rect {size} rx="5" fill="{fill}" stroke="var(--color-foreground-border)"{dashes}/>'


def bar(x: float, y: float, width: float, *, is_ours: bool) -> str:
    """A bar of a plot."""
    fill = "var(--color-brand-primary)" if is_ours else "var(--color-foreground-border)"
    return f'<rect x="{x:.1f}" y="{y:.0f}" width="{width:.1f}" height="12" rx="2" fill="{fill}"/>'


def line(path: str, *, dashed: bool = False, headed: bool = True) -> str:
    """A line along a path, with a head at its end."""
    dashes = ' stroke-dasharray="5 4"' if dashed else ""
    head = ' marker-end="url(#head)"' if headed else ""
    return f'<path d="{path}" fill="none" stroke="var(--color-foreground-secondary)" stroke-width="1.5"{dashes}{head}/>'
