"""Budgets of each folder: code lines and classes, and public names of each package. They only fall.

Code lines hold a token of code: no blank lines, comments or docstrings. A change that needs more says why beside its
folder's line here, and a change that needs less lowers that line.
"""

import ast
import importlib
import io
import tokenize
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = ("rollflow", "stream", "nodes", "policy", "sinks", "cli")
CODE = {tokenize.OP, tokenize.NAME, tokenize.NUMBER, tokenize.STRING, getattr(tokenize, "FSTRING_START", -1)}
SLACK = 40  # code lines by which a folder may be below its budget
BUDGETS = {  # folder -> code lines, classes
    "cli": (1527, 4),
    "nodes": (185, 0),
    "nodes/connectors": (724, 6),
    "nodes/connectors/alpha": (1376, 33),
    "nodes/connectors/common": (741, 10),
    "nodes/connectors/env_to_module": (571, 9),
    "nodes/connectors/learner": (615, 11),
    "nodes/connectors/module_to_env": (641, 13),
    "nodes/connectors/pipelines": (1024, 16),
    "nodes/env": (1219, 12),
    "nodes/env/multi_agent": (1041, 18),
    "nodes/env/remote": (2039, 25),
    "nodes/env/workers": (2059, 36),
    "nodes/external": (245, 4),
    "nodes/launch": (439, 10),
    "nodes/logs": (839, 17),
    "nodes/metrics": (657, 11),
    "nodes/modules": (1376, 33),
    "nodes/offloaded": (2579, 46),
    "nodes/policies": (2975, 21),
    "nodes/rollout": (2027, 25),
    "nodes/stages": (2083, 37),
    "policy": (395, 3),
    "policy/serving": (1098, 24),
    "rollflow": (115, 0),
    "sinks": (30, 0),
    "sinks/datasets": (2183, 27),
    "sinks/learner": (92, 4),
    "sinks/replay": (2209, 31),
    "sinks/trainer": (3438, 41),
    "stream": (64, 0),
    "stream/data": (1115, 36),
    "stream/episodes": (1846, 15),
    "stream/fragments": (1292, 25),
    "stream/graph": (2861, 41),
    "stream/multi_agent": (1363, 20),
    "stream/net": (1277, 25),
    "stream/observe": (1491, 20),
    "stream/wire": (1138, 25),
    "stream/wire/codec": (1381, 41),
}
PUBLIC_NAMES = {"rollflow": 26, "rollflow.stream": 23, "rollflow.nodes": 40, "rollflow.policy": 6, "rollflow.sinks": 21}


def code_lines(source: str) -> int:
    """Number of lines that hold a token of code."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        is_documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if is_documented and ast.get_docstring(node, clean=False) is not None:
            documented.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    held: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in CODE:
            held.update(range(token.start[0], token.end[0] + 1))
    return len(held - documented)


def figures() -> dict[str, tuple[int, int]]:
    """Folder -> code lines and classes of the files in it."""
    lines, classes = Counter[str](), Counter[str]()
    for layer in LAYERS:
        for path in (ROOT / layer).rglob("*.py"):
            source, folder = path.read_text(), path.parent.relative_to(ROOT).as_posix()
            lines[folder] += code_lines(source)
            classes[folder] += sum(isinstance(node, ast.ClassDef) for node in ast.walk(ast.parse(source)))
    return {folder: (lines[folder], classes[folder]) for folder in sorted(lines)}


@pytest.mark.slow
def test_no_folder_grows_and_budgets_follow_what_shrinks() -> None:
    now = figures()
    beyond = {
        folder: f"{count} code lines and {classes} classes, budget {BUDGETS.get(folder, (0, 0))}"
        for folder, (count, classes) in now.items()
        if count > BUDGETS.get(folder, (0, 0))[0] or classes > BUDGETS.get(folder, (0, 0))[1]
    }
    assert beyond == {}
    lower = {
        folder: now.get(folder, (0, 0))
        for folder, (count, classes) in BUDGETS.items()
        if count - now.get(folder, (0, 0))[0] > SLACK or classes > now.get(folder, (0, 0))[1]
    }
    assert lower == {}, "lower these budgets"


@pytest.mark.parametrize("layer", PUBLIC_NAMES)
def test_no_package_has_more_public_names(layer: str) -> None:
    assert len(importlib.import_module(layer).__all__) == PUBLIC_NAMES[layer]


def test_code_lines_are_those_that_hold_code() -> None:
    text = "{0}One.\n\nTwo.{0}\n\nimport io  # three\n\n\ndef f():\n    {0}Four.{0}\n    # five\n"
    text += "    return (\n        {0}a\n        b{0}\n    )\n"
    assert code_lines(text.format('"' * 3)) == 6
