"""The house: imports go one way between layers and between folders, and no folder has too many files."""

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "stream": {"stream", "aliases"},
    "nodes": {"stream", "nodes"},
    "policy": {"stream", "nodes", "policy"},
    "sinks": {"stream", "nodes", "sinks"},
    "cli": {"stream", "nodes", "sinks", "policy", "cli"},
}
FILES = {path.relative_to(ROOT) for layer in MAY_IMPORT for path in (ROOT / layer).rglob("*.py")}
MOST_FILES = 24  # in a folder
HOMES = {  # public name of the package itself -> the module that has it
    alias.name: node.module
    for node in ast.walk(ast.parse((ROOT / "rollflow/__init__.py").read_text()))
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Full names of all that is imported but for typing; a relative import counts as `rollflow..`."""
    if isinstance(tree, ast.If) and "TYPE_CHECKING" in ast.dump(tree.test):
        return
    if isinstance(tree, ast.Import):
        yield from (alias.name for alias in tree.names)
    elif isinstance(tree, ast.ImportFrom):
        module = "rollflow." if tree.level else tree.module
        for alias in tree.names:
            yield f"{HOMES.get(alias.name, module) if module == 'rollflow' else module}.{alias.name}"
    for child in ast.iter_child_nodes(tree):
        yield from imported_names(child)


def imported_layers(source: str) -> set[str]:
    """The layers of rollflow that a file imports from; relative imports count as `.`."""
    names = [name for name in imported_names(ast.parse(source)) if name.startswith("rollflow.")]
    return {name.split(".")[1] or "." for name in names}


def file_of(name: str) -> Path | None:
    """The file that a full name lies in, if it is rollflow's."""
    parts = name.split(".")[1:] if name.startswith("rollflow.") else []
    for end in range(len(parts), 0, -1):
        for path in (Path(*parts[:end]).with_suffix(".py"), Path(*parts[:end], "__init__.py")):
            if path in FILES:
                return path
    return None


def imports_of(path: Path) -> set[Path]:
    """The other files that a file imports; a package's own `__init__` says nothing of who needs whom."""
    found = {file_of(name) for name in imported_names(ast.parse((ROOT / path).read_text()))}
    return {each for each in found if each not in (None, path) and each.name != "__init__.py"}


def circle(edges: Mapping[object, Iterable[object]]) -> list[object]:
    """The members of a circle along the edges, the first one again at the end; none where there is no circle."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        found: list[object] = error.args[1]
        return found
    return []


@pytest.mark.slow
def test_layers_import_only_downwards() -> None:
    layers = {path: imported_layers((ROOT / path).read_text()) for path in FILES}
    assert {path: found for path, found in layers.items() if not found <= MAY_IMPORT[path.parts[0]]} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import rollflow.sinks",
        "from rollflow import sinks",
        "from rollflow.sinks import x",
        "from rollflow.sinks.learner.learner_pipeline import x",
        "from ..sinks import x",
        "def f():\n    import rollflow.sinks.learner.learner_pipeline as y",
    ],
)
def test_every_form_of_import_is_seen(source: str) -> None:
    assert not imported_layers(source) <= MAY_IMPORT["nodes"]


def test_there_are_files_in_every_layer() -> None:
    assert {path.parts[0] for path in FILES} == set(MAY_IMPORT)


@pytest.mark.slow
def test_no_folders_import_each_other() -> None:
    edges: dict[object, set[object]] = {path.parent: set() for path in FILES}
    for path in FILES:
        edges[path.parent] |= {other.parent for other in imports_of(path)} - {path.parent}
    assert circle(edges) == []


@pytest.mark.slow
def test_no_files_import_each_other() -> None:
    assert circle({path: imports_of(path) for path in FILES}) == []


def test_a_circle_is_found() -> None:
    assert set(circle({1: {2}, 2: {3}, 3: {1}, 4: {1}})) == {1, 2, 3}
    assert circle({1: {2}, 2: {3}, 3: set()}) == []


def test_a_folder_has_few_files() -> None:
    sizes = Counter(path.parent for path in FILES)
    assert {folder: size for folder, size in sizes.items() if size > MOST_FILES} == {}
