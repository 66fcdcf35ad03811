"""The programs of other engines on the pages of `docs/coming_from` run, and print what the pages say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGES = Path(__file__).parents[2] / "docs" / "coming_from"
_PROGRAM = re.compile(r"^```python with=(\w+)\n(.*?)^```\n+```text output\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("page", "package"), [("rllib", "ray"), ("torchrl", "torchrl"), ("sb3", "stable_baselines3")])
def test_the_other_engines_program_prints_what_the_page_says(page: str, package: str, tmp_path: Path) -> None:
    [(named, program, expected)] = _PROGRAM.findall((PAGES / f"{page}.md").read_text())
    assert named == package
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, "-W", "ignore", "program.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, expected), done.stderr
