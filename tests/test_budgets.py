"""Budgets of each folder: code lines and classes, and public names of each package. They fall, or a reason says why.

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
    "cli": (1042, 2),  # filmed environments, from nodes/env
    "nodes": (164, 0),  # keywords checked in one place
    "nodes/connectors": (592, 7),  # named pieces, which stood in alpha and in pipelines; bases of pieces by kind
    "nodes/connectors/alpha": (294, 16),  # a connector that normalizes is not found as one that clips
    "nodes/connectors/common": (751, 11),  # pieces over tensors; faults on a device; called as one, from pipelines
    "nodes/connectors/env_to_module": (559, 9),  # pieces over tensors; faults on a device
    "nodes/connectors/learner": (596, 12),  # pieces over tensors; infos that tensors lack
    "nodes/connectors/module_to_env": (
        753,
        14,
    ),  # pieces over tensors; faults on a device; called as one, from pipelines; slots whose output is NaN
    "nodes/connectors/pipelines": (
        879,
        12,
    ),  # own pieces named; a fragment's tensors made at once; modules in turns resolved once; tensors of a device fused
    "nodes/device": (1141, 10),  # states of lanes and environments of tensors, for checkpoints
    "nodes/env": (2499, 29),  # replayed rewards compared; environments that fail with a state
    "nodes/env/remote": (1539, 14),  # lanes on hosts go on; hosts of another version refused
    "nodes/env/workers": (2504, 35),  # states of environments of several agents; states of whole rollouts
    "nodes/external": (237, 3),  # an address checked before the thread starts
    "nodes/launch": (377, 9),  # hosts on Ray asked for their log
    "nodes/logs": (603, 10),  # rows that are made again go
    "nodes/metrics": (583, 10),  # returns of several agents that go on; columns on a device
    "nodes/modules": (1731, 31),  # the state of races in tensors; versions told when loaded; weights of rounds marked
    "nodes/offloaded": (1966, 25),  # layouts shared; ids of episodes in ready fragments
    "nodes/policies": (1898, 9),  # tensors of bfloat16; numbers of enumerations; policies that are pickled
    "nodes/rollout": (2727, 27),  # lost workers and errors replayed; folders of checkpoints locked, late attach refused
    "nodes/stages": (1920, 22),  # states of several modules; fragments and errors shown to a schedule; another prefetch
    "policy": (381, 3),  # what is asked again; observations and sessions counted; the package asked for
    "policy/serving": (810, 20),
    "rollflow": (64, 0),  # a name more
    "sinks": (30, 0),
    "sinks/datasets": (1902, 19),
    "sinks/learner": (76, 4),
    "sinks/replay": (2049, 27),  # clients of a host bounded; a task that waits for a replay is woken
    "sinks/trainer": (2810, 25),  # saved together, by one trainer after the other, and given states; replay refused
    "stream": (64, 0),
    "stream/data": (
        1612,
        39,
    ),  # the episode of a replay that stops, slots whose output is NaN; files of all that is stored
    "stream/episodes": (1670, 13),
    "stream/fragments": (1636, 20),  # layouts shared; answers that wait, and the state of slots in rows of their own
    "stream/graph": (2517, 33),  # items that are away; starts wait for gates; stages that are wrapped
    "stream/multi_agent": (1476, 18),  # layouts shared; lanes of several agents that go on; open episodes saved
    "stream/net": (932, 13),  # looks before TLS begins; sockets that listen and ends of connections
    "stream/observe": (1177, 17),
    "stream/wire": (972, 17),  # items missed of rollouts that a state does not know
    "stream/wire/codec": (1138, 30),
}
PUBLIC_NAMES = {
    "rollflow": 34,  # checkpoints; environments of tensors; those in JAX, whose users write gymnax.make(…) beside it
    "rollflow.stream": 23,
    "rollflow.nodes": 35,
    "rollflow.policy": 6,
    "rollflow.sinks": 20,
}  # of them three records of a rollout's keywords, and two of a trainer stream's


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
