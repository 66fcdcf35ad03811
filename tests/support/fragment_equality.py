"""Equality of fragments from different places, bit for bit."""

import numpy as np

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
