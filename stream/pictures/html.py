"""Pieces of HTML for notebooks."""

from collections.abc import Iterable, Sequence
from html import escape


def preformatted(words: str) -> str:
    """Text as it is, with its lines."""
    return f"<pre>{escape(words)}</pre>"


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table of texts, as the notebook lays tables out."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
