"""Errors name a page of the documentation that is there, on the last line that a traceback shows."""

import copy
import pickle
import re
import traceback
from pathlib import Path

import pytest

from rollflow.stream.data.errors import HELP_PAGES, EnvError, ModuleError, WireError, located, noted

ROOT = Path(__file__).parents[2]
SOURCE = [path for top in ("stream", "nodes", "sinks", "cli") for path in sorted((ROOT / top).rglob("*.py"))]


def slug_of(heading: str) -> str:
    """Anchor of a heading, as MyST makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_a_page_is_named_behind_every_other_note() -> None:
    error = EnvError("no such environment").see("environment")
    with pytest.raises(EnvError), noted("lane 3"):
        raise error
    assert traceback.format_exception(error)[-1] == "see docs/how_to/environments.md#what-env-may-be\n"
    assert error.__notes__[0] == "lane 3"


def test_an_error_that_is_placed_copied_or_pickled_keeps_its_page() -> None:
    with pytest.raises(ModuleError, match="by module 'b': weights") as caught, located("by module 'b'"):
        raise ModuleError("weights").see("weights")
    for error in (caught.value, copy.copy(caught.value), pickle.loads(pickle.dumps(caught.value))):
        assert error.__notes__ == ["see docs/how_to/save_and_go_on.md#when-weights-do-not-fit"]


@pytest.mark.parametrize("code", ["secret", "tls"])
def test_every_error_about_secrets_and_tls_names_its_page(code: str) -> None:
    assert WireError("no", code).__notes__ == [f"see docs/{HELP_PAGES[code]}"]
    assert not hasattr(WireError("no", "order"), "__notes__")


def test_every_topic_is_in_use_and_in_the_table() -> None:
    calls = [topic for path in SOURCE for topic in re.findall(r'\.see\(\s*"([^"]+)"\s*\)', path.read_text())]
    assert {*calls, "secret", "tls"} == HELP_PAGES.keys()


@pytest.mark.parametrize("place", HELP_PAGES.values())
def test_every_page_that_an_error_names_has_that_heading(place: str) -> None:
    page, anchor = place.split("#")
    headings = re.findall(r"^#{2,3} (.+)$", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    assert anchor in map(slug_of, headings)
