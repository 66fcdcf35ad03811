"""A directive for the API's page: public names of packages, with their docstrings.

    ```{public-names} rollflow,rollflow.sinks sinks.replay sinks.datasets
    ```

The names are those that the given folders or files define, or all if none is given.
Docstrings are plain text with aligned tables, which Sphinx would take for paragraphs: they are shown as they stand.
"""

import importlib
import inspect
import re
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

_TABLE_ROW = re.compile(r"^\S+(?: \S+)*  +\S")

_DOCUMENTED_BASES = "ConnectorV2, ConnectorPipelineV2, RLModule, Exception"  # whose members stand there alone


class PublicNames(SphinxDirective):
    """Documents names of `__all__`. Its arguments are packages, with commas, and the folders of the names."""

    required_arguments = 1
    optional_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        lines = StringList()
        for package, name in names_of(" ".join(self.arguments)):
            value = getattr(importlib.import_module(package), name)
            if not inspect.getdoc(value):
                raise self.error(f"{package}.{name} has no docstring, expected one: it is public")
            for line in _directive(f"{package}.{name}", value):
                lines.append(line, f"{package}.{name}")
        return self.parse_text_to_nodes("\n".join(["```{eval-rst}", *lines, "```"]))


def names_of(arguments: str) -> list[tuple[str, str]]:
    """Packages and names of the classes and functions that a directive with these arguments documents."""
    packages, *folders = arguments.split()
    inside = tuple(f"rollflow.{folder}." for folder in folders)
    modules = {package: importlib.import_module(package) for package in packages.split(",")}
    return [
        (package, name)
        for package, module in modules.items()
        for name in module.__all__
        if callable(value := getattr(module, name))
        if not folders or f"{value.__module__}.".startswith(inside)
    ]


def _directive(name: str, value: Any) -> list[str]:
    if inspect.isclass(value):
        return [f".. autoclass:: {name}", "   :members:", f"   :inherited-members: {_DOCUMENTED_BASES}", ""]
    return [f".. autofunction:: {name}", ""]


def skip_others(app: Sphinx, what: str, name: str, value: Any, skip: bool, options: Any) -> bool | None:
    """Leave out what a class inherits from gymnasium's, torch's or Python's."""
    function = value.fget if isinstance(value, property) else value
    return None if (getattr(function, "__module__", None) or "rollflow").startswith("rollflow") else True


def show_tables(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Have aligned tables and indented programs shown as they stand, and mark names as code."""
    shown: list[str] = []
    for paragraph in re.split(r"\n\s*\n", "\n".join(lines)):
        rows = paragraph.split("\n")
        if rows[0].startswith(" ") or any(_TABLE_ROW.match(row) for row in rows):
            shown += ["::", "", *(f"    {row}" for row in rows), ""]
        else:
            shown += [*(_as_text(row) for row in rows), ""]
    lines[:] = shown


def _as_text(row: str) -> str:
    parts = row.split("`")
    plain = [re.sub(r"([*|_\\])", r"\\\1", part) for part in parts[::2]]
    code = [f"``{part}``" for part in parts[1::2]]
    return "".join(part for pair in zip(plain, [*code, ""], strict=False) for part in pair)


def setup(app: Sphinx) -> dict[str, Any]:
    """Add the directive."""
    app.add_directive("public-names", PublicNames)
    app.connect("autodoc-process-docstring", show_tables)
    app.connect("autodoc-skip-member", skip_others)
    return {"parallel_read_safe": True}
