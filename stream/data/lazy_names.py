"""Names of a package that are imported when they are first asked for."""

import ast
import importlib
import sys
from collections.abc import Callable
from typing import Any


def lazy_names(package: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """The `__all__`, the `__getattr__` and the `__dir__` of a package, by its `__name__`.

    Its names are those that its `__init__.py` imports if TYPE_CHECKING. Further names are found by
    `rollflow.aliases`.
    """
    module = sys.modules[package]
    there, homes = vars(module), _homes(module)

    def find(name: str) -> Any:
        from rollflow.aliases import home_of

        home = homes.get(name) or home_of(package, name)
        if home is None:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        try:
            value = getattr(importlib.import_module(home), name)
        except AttributeError as error:  # as of a name that the system lacks: else `from … import` would hide it
            raise ImportError(f"{package}.{name} can't be imported, {home} raised {error}") from error
        there[name] = value
        return value

    def listed() -> list[str]:
        return sorted({*homes, *(name for name in there if name.startswith("__"))})

    return sorted(homes), find, listed


def _homes(package: Any) -> dict[str, str]:
    """Name -> module, of what a package imports if TYPE_CHECKING."""
    blocks = [
        node for node in ast.parse(package.__loader__.get_source(package.__name__)).body if isinstance(node, ast.If)
    ]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}
