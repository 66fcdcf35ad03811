"""The built wheel has every module, and runs README's first program outside the checkout."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = ("stream", "nodes", "policy", "sinks", "cli")


def modules_in(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for layer in LAYERS for path in (folder / layer).rglob("*.py")}


@pytest.mark.slow
def test_the_wheel_works_outside_the_checkout(tmp_path: Path) -> None:
    source, installed = tmp_path / "source", tmp_path / "installed"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--target", str(installed), str(source)], check=True, timeout=300)
    assert modules_in(installed / "rollflow") == modules_in(ROOT)
    program = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert program is not None
    (tmp_path / "program.py").write_text(f"{program[1]}\nimport rollflow\n\nprint(rollflow.__file__)\n")
    options = {"cwd": tmp_path, "env": {"PYTHONPATH": str(installed)}, "timeout": 120, "check": False}
    done = subprocess.run([sys.executable, "program.py"], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^torch\.Size\(.* mean return ", done.stdout, re.MULTILINE)) == 3
    *_, conclusion, place = done.stdout.splitlines()
    assert conclusion.startswith("held back by ")
    assert place == str(installed / "rollflow" / "__init__.py")
