"""Episodes of a dataset in Parquet files, read row group by row group."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollflow.sinks.datasets.arrow_columns import Description, empty_tree, import_pyarrow, tree_of
from rollflow.sinks.datasets.dataset_folder import ENV_T, EPISODES, LAST_OBS, STEPS, DatasetFolder
from rollflow.sinks.datasets.episode_index import UNREADABLE, EpisodeIndex, damaged, open_file, ranges
from rollflow.sinks.datasets.stored_steps import Ints, StoredSteps, in_pairs
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.tree import Tree, map_tree


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

    def read(self, episodes: Ints, names: Collection[str], *, with_last: bool) -> StoredSteps:
        """Read the steps of episodes: see `EpisodeStore`; a module's have the column `env_t` as well."""
        index, names = self.index, list(names)
        chunks = index.chunks_of(episodes)
        lengths = index.chunk_steps[chunks]
        order = np.argsort(chunks)  # as they lie in the files
        begins, size = np.empty_like(lengths), 0  # of each chunk, among all parts
        parts = {name: [empty_tree(self._described[name], 0)] for name in names}
        groups = [(group, order[part]) for group, part in _parts(index.group[chunks[order]])]
        with ExitStack() as files:
            readers = [_Reader(self._folder, index, names, files) for _ in range(2)]
            reads = [partial(readers[at % 2].table, *index.groups[group]) for at, (group, _) in enumerate(groups)]
            with closing(in_pairs(reads)) as tables:
                for (_, mine), table in zip(groups, tables, strict=True):
                    rows, counts = index.row[chunks[mine]], lengths[mine]
                    trees = [tree_of(table.column(name), self._described[name]) for name in names]
                    total, wanted = table.num_rows, ranges(rows, counts)
                    if 2 * len(wanted) < total:  # the rest is let go
                        trees = [map_tree(lambda leaf, w=wanted: leaf.take(w, axis=0), tree) for tree in trees]
                        total, rows = len(wanted), np.cumsum(counts) - counts
                    begins[mine] = size + rows
                    size += total
                    for name, tree in zip(names, trees, strict=True):
                        parts[name].append(tree)
        last_obs, initial = None, None
        if with_last:
            last_obs, _ = self._of_chunks(LAST_OBS, self.columns[Columns.OBS], index.last[episodes])
            if Columns.STATE_OUT in self.columns:
                heads = index.order[index.first[episodes]]
                initial = self._of_chunks(Columns.STATE_IN, self.columns[Columns.STATE_OUT], heads)
        parts = {name: trees[1:] or trees for name, trees in parts.items()}
        return StoredSteps(parts, ranges(begins, lengths), last_obs, initial)

    def _of_chunks(self, name: str, described: Description, chunks: Ints) -> tuple[Tree, NDArray[np.bool_]]:
        """Read what is stored beside the steps of some chunks, i64[K]: a tree of arrays any[K, ...].

        Also gives bool[K] of the chunks whose file has the column, which files of earlier versions may lack.
        """
        index, order = self.index, np.argsort(chunks)
        rows, parts, size = np.empty_like(chunks), [empty_tree(described, 0)], 0
        is_there = np.ones(len(chunks), np.bool_)
        for number, in_file in _parts(index.file[chunks[order]]):
            mine = order[in_file]
            groups, at = np.unique(index.group[chunks[mine]], return_inverse=True)
            counts = index.group_chunks[groups]
            with self._opened(EPISODES, number) as file:
                if name in file.schema_arrow.names:
                    numbers = [index.groups[group][1] for group in groups.tolist()]
                    table = file.read_row_groups(numbers, columns=[name], use_threads=False)
                    parts.append(tree_of(table.column(name), described))
                else:
                    is_there[mine] = False
                    parts.append(map_tree(np.zeros_like, empty_tree(described, int(counts.sum()))))
            rows[mine] = size + index.place[chunks[mine]] + (np.cumsum(counts) - counts)[at]
            size += int(counts.sum())
        steps = StoredSteps({name: parts[1:] or parts}, rows, None)
        steps.join()
        return steps.taken(name), is_there

    @contextmanager
    def _opened(self, kind: str, number: int) -> Iterator[Any]:
        """A file, for reading. Raises DatasetError, with its name, where it can't be read as it was written."""
        with open_file(self._folder, kind, number, self.index.footers[number][kind]) as file:
            try:
                yield file
            except UNREADABLE as error:
                raise damaged(self._folder.file(kind, number), error) from None


class _Reader:
    """Reads row groups of steps, in one thread at a time.

    files    closes what it opens
    """

    def __init__(self, folder: DatasetFolder, index: EpisodeIndex, names: Sequence[str], files: ExitStack) -> None:
        self._folder, self._index, self._names, self._files = folder, index, names, files
        self._number = -1
        self._file: Any = None

    def table(self, number: int, group: int) -> Any:
        """The table of a row group of a file. Raises DatasetError, with its name, where it can't be read."""
        if number != self._number:
            footer = self._index.footers[number][STEPS]
            self._file = self._files.enter_context(open_file(self._folder, STEPS, number, footer))
            self._number = number
        try:
            return self._file.read_row_group(group, columns=self._names, use_threads=False)
        except UNREADABLE as error:
            raise damaged(self._folder.file(STEPS, number), error) from None


def _parts(values: Ints) -> Iterator[tuple[int, slice]]:
    """Each value of i64[P], ascending, and where it stands."""
    found, firsts = np.unique(values, return_index=True)
    for value, first, end in zip(found.tolist(), firsts, np.append(firsts, len(values))[1:], strict=True):
        yield value, slice(int(first), int(end))
