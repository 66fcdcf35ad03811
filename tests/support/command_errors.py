"""What a command prints when it can't go on."""

from collections.abc import Callable

Says = Callable[..., str]  # runs the command with some words; what it prints


def assert_one_line(error: str) -> None:
    """The error is one line; a second one may name the page of the documentation that helps."""
    line, *pages = error.splitlines()
    assert line.startswith("rollflow: ")
    assert len(pages) <= 1
    assert all(page.startswith("see docs/") for page in pages)
