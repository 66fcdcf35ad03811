"""Tables of arrays for notebooks: the name, dtype and shape of each, and a plot of the rewards."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np


def array_table(title: str, columns: Mapping[str, Any], rewards: Any) -> str:
    """HTML of a title, a table and a plot.

    columns    name -> tree of arrays, or a list of items that are no array yet
    rewards    f32[T], or a list of T numbers
    """
    from rollflow.stream.observe import svg  # which a policy that acts alone need not load
    from rollflow.stream.observe.svg import preformatted, table

    rows = [row for name, tree in columns.items() for row in _rows(name, tree)]
    values = np.asarray(rewards, np.float64).tolist()
    plotted = svg.plot(values, "rewards")
    return f"{preformatted(title)}{table(('column', 'dtype', 'shape'), rows)}<div>rewards {plotted}</div>"


def _rows(name: str, tree: Any) -> Iterator[tuple[str, str, str]]:
    if isinstance(tree, Mapping):
        for key, part in tree.items():
            yield from _rows(f"{name}.{key}", part)
    elif isinstance(tree, tuple):
        for place, part in enumerate(tree):
            yield from _rows(f"{name}.{place}", part)
    elif isinstance(tree, list):
        yield name, "list", f"({len(tree)})"
    else:
        array = np.asarray(tree)
        yield name, str(array.dtype), str(array.shape)
