"""The site's build, by the command of CONTRIBUTING.md, refuses pages that are wrong."""

import importlib
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from extras import needs
from forked_programs import Programs

needs("sphinx", "furo", "myst_parser")

ROOT = Path(__file__).parents[2]
INDEX = "# Site\n\n```{toctree}\n:glob:\n\n*\n```\n"
WRONG = {
    "dead_link": ("[there](missing.md)", "missing.md"),
    "dead_heading": ("[there](index.md#nothing)", "nothing"),
    "dead_file": ("![there](missing.png)", "missing.png"),
    "missing_reference": ("{py:class}`rollflow.stream.Nothing`", "rollflow.stream.Nothing"),
    "undocumented": ("```{public-names} undocumented\n```", "undocumented.silent has no docstring"),
    "unknown_directive": ("```{no-directive}\n```", "no-directive"),
    "broken_picture": ("```{graph-picture} a graph\ngraph = 1 / 0\n```", "division by zero"),
}


def options() -> list[str]:
    """The program's options, as CONTRIBUTING.md has them, without the two folders."""
    section = (ROOT / "CONTRIBUTING.md").read_text().split("<!-- docs -->")[1]
    [found] = re.findall(r"sphinx-build (.*) docs build/site$", section, re.MULTILINE)
    return [*shlex.split(found), "-q"]


@pytest.mark.slow
def test_every_kind_of_wrong_page_is_named_and_fails_the_build(programs: Programs, tmp_path: Path) -> None:
    """By the docs' own settings, which build the site as it is."""
    for name in ("_extensions", "_static"):
        shutil.copytree(ROOT / "docs" / name, tmp_path / name)
    shutil.copy(ROOT / "docs" / "conf.py", tmp_path)
    (tmp_path / "_extensions" / "undocumented.py").write_text('__all__ = ["silent"]\n\n\ndef silent():\n    pass\n')
    for name, (text, _) in WRONG.items():
        (tmp_path / f"{name}.md").write_text(f"# Page\n\n{text}\n")
    (tmp_path / "index.md").write_text(INDEX)
    sphinx = Path(sys.executable).parent / "sphinx-build"
    with programs.start(tmp_path, sphinx, *options(), str(tmp_path), str(tmp_path / "site")) as program:
        status, _, problems = program.wait(longest_s=600)
    assert status == 1
    for name, (_, expected) in WRONG.items():
        assert re.search(rf"/{name}\.md.*{re.escape(expected)}", problems), f"{name}:\n{problems}"


def test_the_api_page_has_every_public_name_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs" / "_extensions")
    names_of = importlib.import_module("public_names").names_of
    directives = re.findall(r"^```\{public-names\} (.+)$", (ROOT / "docs/reference/api.md").read_text(), re.MULTILINE)
    packages = {package for arguments in directives for package in arguments.split()[0].split(",")}
    assert len(packages) == 6
    shown = [name for arguments in directives for name in names_of(arguments)]
    assert sorted(shown) == sorted(name for package in packages for name in names_of(package))
