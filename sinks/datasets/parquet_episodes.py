"""Episodes of a dataset in Parquet files, read row group by row group."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from rollflow.sinks.datasets.arrow_columns import Description, import_pyarrow, scatter, tree_of
from rollflow.sinks.datasets.dataset_folder import ENV_T, EPISODES, LAST_OBS, STEPS, DatasetFolder
from rollflow.sinks.datasets.episode_block import Ints
from rollflow.sinks.datasets.episode_index import UNREADABLE, EpisodeIndex, damaged, open_file, ranges
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.tree import Tree


class ParquetEpisodes:
    """Episodes that a `DatasetSink` has written, of one agent or of a module: an `EpisodeStore`.

    index    of the episodes; None: of all

    Raises DatasetError where there is no dataset, or one that is damaged.
    """

    def __init__(self, folder: DatasetFolder, index: EpisodeIndex | None = None) -> None:
        import_pyarrow()
        self._folder = folder
        self.description = folder.read()
        self.columns: Mapping[str, Description] = self.description["columns"]
        self.observation_space = folder.space(self.description, "observation_space")
        self.action_space = folder.space(self.description, "action_space")
        self.index = index = EpisodeIndex(folder) if index is None else index
        self._described = {**self.columns, ENV_T: {"dtype": "int64", "shape": []}}
        self.version = index.numbers
        self.num_steps, self.t_started, self.ids, self.runs = index.num_steps, index.t_started, index.ids, index.runs
        self.lost: Mapping[int, str] = index.lost

    def fill(self, episodes: Ints, columns: Mapping[str, Tree], last_obs: Tree | None) -> None:
        """Read the steps of episodes into arrays: see `EpisodeStore`."""
        index = self.index
        chunks = index.chunks_of(episodes)
        lengths = index.chunk_steps[chunks]
        begins = np.cumsum(lengths) - lengths
        order = np.argsort(chunks)  # as they lie in the files
        chunks, lengths, begins = chunks[order], lengths[order], begins[order]
        for number, in_file in _parts(index.file[chunks]):
            with self._opened(STEPS, number) as file:
                for group, part in _parts(index.group[chunks[in_file]]):
                    mine = slice(in_file.start + part.start, in_file.start + part.stop)
                    rows = ranges(index.row[chunks[mine]], lengths[mine])
                    to = ranges(begins[mine], lengths[mine])
                    table = file.read_row_group(index.groups[group][1], columns=list(columns), use_threads=False)
                    for name, tree in columns.items():
                        scatter(tree_of(table.column(name), self._described[name]), rows, tree, to)
        if last_obs is not None:
            self._fill_last(index.last[episodes], last_obs)

    def _fill_last(self, chunks: Ints, last_obs: Tree) -> None:
        """Read the observation behind each of some chunks, i64[K]."""
        index, order = self.index, np.argsort(chunks)
        chunks = chunks[order]
        for number, mine in _parts(index.file[chunks]):
            groups, at = np.unique(index.group[chunks[mine]], return_inverse=True)
            with self._opened(EPISODES, number) as file:
                in_file = [index.groups[group][1] for group in groups.tolist()]
                table = file.read_row_groups(in_file, columns=[LAST_OBS], use_threads=False)
                read = tree_of(table.column(LAST_OBS), self.columns[Columns.OBS])
            counts = index.group_chunks[groups]
            scatter(read, index.place[chunks[mine]] + (np.cumsum(counts) - counts)[at], last_obs, order[mine])

    @contextmanager
    def _opened(self, kind: str, number: int) -> Iterator[Any]:
        """A file, for reading. Raises DatasetError, with its name, where it can't be read as it was written."""
        with open_file(self._folder, kind, number, self.index.footers[number][kind]) as file:
            try:
                yield file
            except UNREADABLE as error:
                raise damaged(self._folder.file(kind, number), error) from None


def _parts(values: Ints) -> Iterator[tuple[int, slice]]:
    """Each value of i64[P], ascending, and where it stands."""
    found, firsts = np.unique(values, return_index=True)
    for value, first, end in zip(found.tolist(), firsts, [*firsts[1:], len(values)], strict=True):
        yield value, slice(int(first), int(end))
