"""The programs on README and the documentation's pages run, and print what the pages say.

Fences on a page, by their first words:

    python                the next part of the page's program, which runs as one process in an empty folder
    python file=NAME      a file in that folder
    python with=PACKAGE   a program of another engine, which `tests/oracle` or a test of that package's form runs
    text output           what the part before prints; `...` stands for anything
    console               commands `$ rollflow …` that run in that folder, and what they print

A comment `<!-- together: A B -->` runs files at the same time; each has to end without an error. `bash`, `text` and
others are only shown.
"""

import doctest
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
from extras import needs
from forked_programs import Program, Programs

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
LONGEST_S = 300
_FENCE = re.compile(r"^```(\S+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TOGETHER = re.compile(r"<!-- together: (.+?) -->")
COMMAND = Path(sys.executable).parent / "rollflow"
_MARK = "\N{NULL}next part"


class Block(NamedTuple):
    """A fenced block."""

    language: str
    rest: str
    text: str


def blocks_of(page: Path) -> list[Block]:
    """A page's fenced blocks, in order."""
    return [Block(kind, rest.strip(), text) for kind, rest, text in _FENCE.findall(page.read_text())]


def run(programs: Programs, folder: Path, path: Path, *arguments: str) -> str:
    """Run a script that must end without an error, and return what it prints."""
    with programs.start(folder, path, *arguments) as program:
        return checked(program, path.name)


def checked(program: Program, name: str) -> str:
    """What a program prints that must end without an error."""
    ended = program.wait(LONGEST_S)
    assert ended.status == 0, f"{name} ended with {ended.status}:\n{ended.out}\n{ended.errors}"
    return ended.out


def check_printed(expected: str, printed: str) -> None:
    """Hold what was printed against what the page shows."""
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.OutputChecker().check_output(expected, printed, flags), f"expected:\n{expected}\ngot:\n{printed}"


def check_program(programs: Programs, blocks: list[Block], folder: Path) -> None:
    """Run the page's program, and hold what each of its parts prints against the page."""
    parts, expected, is_ours = list[str](), dict[int, str](), True
    for block in blocks:
        if block.language == "python":
            is_ours = not block.rest.startswith("with=")
        if (block.language, block.rest) == ("python", ""):
            parts.append(block.text)
        elif (block.language, block.rest) == ("text", "output") and is_ours:
            expected[len(parts) - 1] = block.text
    if parts:
        (folder / "page.py").write_text(f"\nprint({_MARK!r}, flush=True)\n".join(parts))
        printed = run(programs, folder, folder / "page.py").split(f"{_MARK}\n")
        assert len(printed) == len(parts)
        for number, text in expected.items():
            check_printed(text, printed[number])


def check_together(programs: Programs, names: list[str], folder: Path) -> None:
    """Run files at the same time, all of which end by themselves."""
    with ExitStack() as running:
        started = [running.enter_context(programs.start(folder, folder / name)) for name in names]
        for name, program in zip(names, started, strict=True):
            checked(program, name)


def commands_in(text: str) -> Iterator[tuple[list[str], str]]:
    """The arguments of each command `rollflow` of a console block, with what it prints."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, printed = part.partition("\n")
        name, *arguments = shlex.split(command)
        assert name == "rollflow"
        yield arguments, printed


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_a_pages_programs_run_and_print_what_it_says(page: Path, programs: Programs, tmp_path: Path) -> None:
    blocks = blocks_of(page)
    if any("OnnxPolicy" in block.text for block in blocks):
        needs("onnx", "onnxruntime", "onnxscript")
    if any("JaxEnvs" in block.text for block in blocks):
        needs("jax", "pgx")
    for block in blocks:
        if block.rest.startswith("file="):
            (tmp_path / block.rest.removeprefix("file=")).write_text(block.text)
    check_program(programs, blocks, tmp_path)
    for names in _TOGETHER.findall(page.read_text()):
        check_together(programs, names.split(), tmp_path)
    for block in blocks:
        for arguments, printed in commands_in(block.text) if block.language == "console" else ():
            check_printed(printed, run(programs, tmp_path, COMMAND, *arguments))


def test_every_python_block_of_a_page_is_run() -> None:
    for page in PAGES:
        named = {block.rest.removeprefix("file=") for block in blocks_of(page) if block.rest.startswith("file=")}
        text = page.read_text()
        together = {name for names in _TOGETHER.findall(text) for name in names.split()}
        assert together <= named, page
        for name in named - together:
            assert re.search(rf"^(\$ .*\b|import |from ){re.escape(name.removesuffix('.py'))}\b", text, re.MULTILINE), (
                f"{page}: {name} is shown and never run"
            )


def links_of(page: Path) -> set[Path]:
    """Other pages that a page links to."""
    return {(page.parent / link).resolve() for link in re.findall(r"\]\(([^)#\s]+\.md)[^)]*\)", page.read_text())}


def test_every_page_is_at_most_two_clicks_from_readme() -> None:
    first = links_of(ROOT / "README.md")
    assert set(PAGES) <= {ROOT / "README.md"}.union(first, *map(links_of, first))


def test_files_that_pages_name_are_there() -> None:
    for page in PAGES:
        for path in re.findall(
            r"`((?:stream|nodes|sinks|cli|examples|benchmarks|tests)/[\w/]+(?:\.\w+)?)`", page.read_text()
        ):
            assert (ROOT / path).exists(), f"{page.relative_to(ROOT)} names {path}, which is not there"


@pytest.mark.slow
@pytest.mark.parametrize(("shown", "is_right"), [("12", True), ("1...", True), ("13", False), ("12\n12", False)])
def test_a_page_with_another_output_is_refused(programs: Programs, tmp_path: Path, shown: str, is_right: bool) -> None:
    page = [Block("python", "", "x = 5\n"), Block("python", "", "print(7 + x)\n"), Block("text", "output", shown)]
    if is_right:
        check_program(programs, page, tmp_path)
    else:
        with pytest.raises(AssertionError, match="expected:"):
            check_program(programs, page, tmp_path)
