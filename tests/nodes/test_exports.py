"""Exports of `rollflow.nodes`, and the modules that each one imports."""

import ast
import subprocess
import sys
from pathlib import Path

import rollflow.nodes


def test_every_name_that_the_type_checker_finds_is_there() -> None:
    seen = {
        alias.name
        for node in ast.walk(ast.parse(Path(rollflow.nodes.__file__).read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rollflow.nodes.")
        for alias in node.names
    }
    assert seen == set(rollflow.nodes.__all__) <= set(dir(rollflow.nodes))
    assert all(hasattr(rollflow.nodes, name) for name in rollflow.nodes.__all__)


def test_a_name_that_is_not_there_is_refused_as_ever() -> None:
    assert not hasattr(rollflow.nodes, "Nope")


def test_a_process_that_only_steps_environments_does_without_torch() -> None:
    program = "import sys, rollflow.nodes.env.environments; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": ":".join(sys.path)}).returncode == 0
