"""Imports go one way: the command, sinks, nodes, stream."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "stream": {"stream"},
    "nodes": {"stream", "nodes"},
    "sinks": {"stream", "nodes", "sinks"},
    "cli": {"stream", "nodes", "sinks", "cli"},
}
FILES = [path for layer in MAY_IMPORT for path in sorted((ROOT / layer).rglob("*.py"))]


def imported_layers(source: str) -> set[str]:
    """The layers of rollflow that a file imports from; relative imports count as `.`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level:
            names.add("rollflow..")
        elif isinstance(node, ast.ImportFrom) and node.module == "rollflow":
            names |= {f"rollflow.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return {name.split(".")[1] or "." for name in names if name.startswith("rollflow.")}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_layers_import_only_downwards(path: Path) -> None:
    assert imported_layers(path.read_text()) <= MAY_IMPORT[path.relative_to(ROOT).parts[0]]


@pytest.mark.parametrize(
    "source",
    [
        "import rollflow.sinks",
        "from rollflow import sinks",
        "from rollflow.sinks import x",
        "from rollflow.sinks.learner_pipeline import x",
        "from ..sinks import x",
        "def f():\n    import rollflow.sinks.learner_pipeline as y",
    ],
)
def test_every_form_of_import_is_seen(source: str) -> None:
    assert not imported_layers(source) <= MAY_IMPORT["nodes"]


def test_there_are_files_in_every_layer() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(MAY_IMPORT)
