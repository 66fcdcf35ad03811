"""Pictures show what the graph and the tables have, and keep within their width."""

import re
from pathlib import Path
from typing import Any

import pytest
from extras import needs

needs("sphinx")

ROOT = Path(__file__).parents[2]
LETTER = 7.2  # a wide letter of this size, in the picture's units


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that draws, which is no package's."""
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "_extensions"))
    import pictures

    return pictures


def words_in(parts: list[str]) -> list[str]:
    """Lines of text in a picture, in order."""
    return re.findall(r">([^<>]+)</text>", "".join(parts))


def test_messages_stand_in_their_order_and_note_a_break(pictures: Any) -> None:
    parts, _ = pictures.message_parts(["a | b", "a > b: step 1", "b: works", "---: it breaks", "b > a: rows 1"])
    assert words_in(parts) == ["a", "b", "step 1", "works", "it breaks", "rows 1"]


def test_a_tables_empty_cells_have_what_stands_above(pictures: Any) -> None:
    page = "# Speed\n\n| a | b |\n| --- | ---: |\n| 1 | x |\n| | y |\n\n## Other\n\n| a |\n| --- |\n| 9 |\n"
    assert pictures.rows_under(page, "Speed") == [{"a": "1", "b": "x"}, {"a": "1", "b": "y"}]


def test_bars_are_as_long_as_their_figures_and_the_rows_words_fit(pictures: Any) -> None:
    rows = pictures.rows_under((ROOT / "docs" / "explanation" / "speed.md").read_text(), "Rollouts")
    parts, _ = pictures.figure_parts(rows, "TorchRL|RLlib|Baselines|loop")
    widths = [float(width) for width in re.findall(r'width="([\d.]+)" height="12"', "".join(parts))]
    figures = [int(words.rsplit(": ", 1)[1].replace(",", "")) for words in words_in(parts) if ": " in words]
    assert len(widths) == len(figures) > 20
    for (ours, theirs), (long, longer) in zip(pairs(figures), pairs(widths), strict=True):
        assert long / longer == pytest.approx(ours / theirs, rel=0.05, abs=0.05)
    for x, words in re.findall(r'<text x="(\d+)"[^>]*>([^<]+)<', "".join(parts)):
        assert int(x) + LETTER * len(words) < 440 * 1.05, words


def pairs(items: list[Any]) -> list[tuple[Any, Any]]:
    """Neighbours, two by two."""
    return list(zip(items[::2], items[1::2], strict=True))


def test_nothing_to_draw_is_an_error(pictures: Any) -> None:
    with pytest.raises(ValueError, match="no row has 'Nobody'"):
        pictures.figure_parts([{"beside": "the loop"}], "Nobody")
