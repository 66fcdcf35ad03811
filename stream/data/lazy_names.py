"""Names of a package that are imported when they are first asked for."""

import gc
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str], within: str | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and the `__dir__` of a package.

    package    its `__name__`
    homes      name -> the file that has it, as a module's path
    within     package that these paths begin at; None: the same one
    """
    there = vars(sys.modules[package])

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        home = f"{within or package}.{homes[name]}"
        with _no_collection():
            try:
                value = getattr(importlib.import_module(home), name)
            except AttributeError as error:  # as of a name that the system lacks: else `from … import` would hide it
                raise ImportError(f"{package}.{name} can't be imported, {home} raised {error}") from error
        there[name] = value
        return value

    def listed() -> list[str]:
        return sorted({*there, *homes})

    return find, listed


@contextmanager
def _no_collection() -> Iterator[None]:
    """Put off collecting garbage, of which imports make hardly any: one pass over all that torch has takes 75 ms."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
