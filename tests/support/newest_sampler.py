"""A sampler of the newest steps, by which tests look at what a replay holds."""

import numpy as np

from rollflow.sinks import Draw, Sampler
from rollflow.sinks.replay.row_index import RowIndex


class Newest(Sampler):
    """Takes the newest steps, newest first, each once. A replay with fewer steps gives all that it has."""

    def draw(self, rows: RowIndex, count: int, generator: np.random.Generator) -> Draw:
        positions = np.arange(rows.begin, rows.end)
        positions = positions[rows.is_kept(positions)][::-1][:count].copy()
        return Draw(positions, positions)
