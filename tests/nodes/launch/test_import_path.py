"""Import paths of what hosts make themselves, and what hosts can't import."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from numbered_env import NumberedEnv
from numbered_module import NumberedModule

from rollflow import Rollout
from rollflow.nodes import OnProcesses
from rollflow.nodes.launch.on_hosts import import_path
from rollflow.stream import EnvError, ModuleError


def test_a_class_is_named_by_its_module() -> None:
    assert import_path(NumberedModule, "module") == "numbered_module:NumberedModule"


class Outer:
    class Inner:
        """Not at the top of a file."""


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (lambda: None, r"env is .*test_import_path.<lambda>, which hosts can't import"),
        (Outer.Inner, r"env is .*test_import_path.Outer.Inner, which hosts can't import"),
        (partial(NumberedEnv, 3), r"env is functools.partial\(.*, which hosts can't import"),
        ([NumberedEnv], r"env is \[.*\], which hosts can't import"),
    ],
    ids=["lambda", "inner", "partial", "list"],
)
def test_what_hosts_can_not_import_is_refused(value: Any, told: str) -> None:
    with pytest.raises(EnvError, match=told + "; expected a class or function at the top of a file"):
        Rollout(value, where=OnProcesses())


def test_a_module_that_is_made_already_is_refused() -> None:
    with pytest.raises(ModuleError, match=r"module is a NumberedModule that is made already, and hosts make their own"):
        Rollout("CartPole-v1", module=NumberedModule(), where=OnProcesses())


SCRIPT = """
from rollflow.nodes.launch.on_hosts import import_path

class Policy:
    pass

if __name__ == "__main__":
    print(import_path(Policy, "module"))
"""


def said(*arguments: str, folder: Path, source: str | None = None) -> str:
    """What a program says, or its last line where it fails."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ran = subprocess.run(
        [sys.executable, *arguments], input=source, cwd=folder, env=env, capture_output=True, text=True
    )
    return ran.stdout.strip() or ran.stderr.strip().splitlines()[-2]


@pytest.mark.slow
def test_a_program_names_its_own_file(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "my-train.py").write_text(SCRIPT)
    assert said("train.py", folder=tmp_path) == said("-m", "train", folder=tmp_path) == "train:Policy"
    told = "this program has no file that hosts can import; expected a class or function at the top of a file"
    assert told in said("my-train.py", folder=tmp_path)
    assert told in said("-", folder=tmp_path, source=SCRIPT)
