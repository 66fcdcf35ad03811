"""Import paths of a user's objects, for programs on other hosts: nothing is pickled for them."""

import sys
from pathlib import Path
from typing import Any

from rollflow.stream.data.errors import EnvError, shown

_EXPECTED = "expected a class or function at the top of a file that can be imported"


def import_path(value: Any, argument: str) -> str:
    """The path of a class or function, `package.module:name`.

    argument    which it was given as, for errors

    A program's own file counts as a module where it stands in a folder that is searched for modules: hosts import it
    by its name. Raises EnvError for what can't be imported.
    """
    name, module = getattr(value, "__qualname__", None), getattr(value, "__module__", None)
    if not isinstance(name, str) or not isinstance(module, str):
        raise EnvError(
            f"{argument} is {shown(value)}, which hosts can't import; {_EXPECTED}, and not what it makes"
        ).see("started hosts")
    if getattr(sys.modules.get(module), name, None) is not value:
        raise EnvError(f"{argument} is {module}.{name}, which hosts can't import; {_EXPECTED}").see("started hosts")
    if module == "__main__":
        module = _main_module(f"{argument} is {module}.{name}")
    return f"{module}:{name}"


def _main_module(where: str) -> str:
    """The name by which others import this program's main module. Raises EnvError where they can't."""
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        return str(spec.name)
    if file is not None:
        path = Path(file).resolve()
        if path.stem.isidentifier() and path.suffix == ".py" and path.parent in [Path(p).resolve() for p in sys.path]:
            return path.stem
    raise EnvError(f"{where}, and this program has no file that hosts can import; {_EXPECTED}").see("started hosts")
