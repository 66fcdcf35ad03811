"""Equality of fragments from different places, bit for bit."""

from typing import Any

import numpy as np
import torch

from rollflow import Fragment
from rollflow.stream.data.tree import map_tree
from rollflow.stream.testing import check


def assert_alike(ours: list[Fragment], others: list[Fragment]) -> None:
    for mine, other in zip(ours, others, strict=True):
        assert (mine.lane, mine.sequence, mine.columns.keys()) == (other.lane, other.sequence, other.columns.keys())
        # Rows of dead steps have no meaning, but are the same all the same.
        for name in mine.columns:
            map_tree(np.testing.assert_array_equal, mine.column(name), other.column(name))
        states = [[chunk.get_state() for chunk in fragment.episodes()] for fragment in (mine, other)]
        for state, like in zip(*states, strict=True):
            check({**state, "duration_s": 0}, {**like, "duration_s": 0})


def assert_equal_batches(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Same columns, dtypes and numbers."""
    assert one.keys() == other.keys()
    for name in one:
        parts = [batch[name] if isinstance(batch[name], dict) else {"": batch[name]} for batch in (one, other)]
        assert parts[0].keys() == parts[1].keys()
        for key in parts[0]:
            assert parts[0][key].dtype == parts[1][key].dtype, name
            torch.testing.assert_close(
                parts[0][key], parts[1][key], rtol=0, atol=0, msg=lambda told, n=name: f"{n}: {told}"
            )
