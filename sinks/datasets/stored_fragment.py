"""Fragments made of stored episodes: views of a block of them."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollflow.sinks.datasets.episode_block import EpisodeBlock, EpisodeStore, Ints, StoredSteps
from rollflow.stream.data.column import Column
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.tree import Tree, leaves_of, map_tree, tree_at
from rollflow.stream.fragments.fragment import Fragment, FragmentLayout
from rollflow.stream.fragments.fragment_records import ChunkIndex


class StoredColumn(Column):
    """A column that is taken from stored steps when it is first looked at; read-only.

    rows    steps, i64[rows]
    """

    __slots__ = ("_rows", "_steps")

    def __init__(self, name: str, steps: StoredSteps, rows: Ints) -> None:
        self.name, self._steps, self._rows = name, steps, rows

    def __getattr__(self, name: str) -> Any:
        """What `Column` has, which is not there yet."""
        if name not in Column.__slots__:
            raise AttributeError(f"a column has no {name!r}")
        super().__init__(self.name, map_tree(lambda leaf: leaf[:, None], self._steps.taken(self.name, self._rows)))
        self.seal()
        return getattr(self, name)

    @property
    def nbytes(self) -> int:
        """Bytes in the arrays."""
        trees = self._steps.parts[self.name]
        row_bytes: int = sum(leaf.nbytes // max(1, len(leaf)) for leaf in leaves_of(trees[0]))
        return row_bytes * len(self._rows)


class StoredIds:
    """Ids of a fragment's episodes by their numbers, of which there is one slot.

    ids    object[C] text
    """

    def __init__(self, ids: NDArray[np.object_]) -> None:
        self._ids = ids

    def __call__(self, slot: int, number: int) -> str:
        """The id of the episode of this number."""
        return str(self._ids[number])


class StoredFragment(Fragment):
    """Fragment of stored steps: one slot in which parts of episodes stand one behind the other.

    block       in which the rows lie
    begin, end  rows of the steps
    lookback    steps before the first that its episode may show
    sequence    number of the fragment

    dataset     that the steps are from
    runs        i64[C]    number of each chunk's run there
    """

    def __init__(self, block: EpisodeBlock, begin: int, end: int, *, lookback: int, sequence: int, name: str) -> None:
        at = slice(int(np.searchsorted(block.stop, begin, "right")), int(np.searchsorted(block.start, end)))
        store, episodes, starts, stops = block.store, block.episodes[at], block.start[at], block.stop[at]
        before = min(begin - max(int(starts[0]), 0), lookback)
        layout = FragmentLayout(1, end - begin, before, store.action_space, False, StoredIds(store.ids[episodes]))
        first = begin - before
        self._steps, self._rows = block.steps, slice(begin, end)
        rows = np.arange(first, end)
        behind = np.append(rows, min(end, block.num_rows - 1))  # an episode's own last observation is not in the column
        columns: dict[str, Column] = {
            key: StoredColumn(key, block.steps, behind if key == Columns.OBS else rows) for key in block.steps.parts
        }
        none = np.zeros(1, np.int64)
        super().__init__(layout, 0, sequence, columns, episode_start=none, episode_number=none)
        self.observation_space, self.name = store.observation_space, name
        self.dataset: EpisodeStore = store
        self.runs: Ints = store.runs[episodes]
        start, stop = np.maximum(starts, begin), np.minimum(stops, end)
        is_end = stop == stops
        self._ended = np.flatnonzero(is_end)
        self._last_obs = map_tree(lambda leaf: leaf[at][self._ended], block.steps.last_obs)
        looks_back = np.zeros_like(start)
        looks_back[0] = before
        self.chunks = ChunkIndex(
            slot=np.zeros_like(start),
            number=np.arange(len(start)),
            start=start - first,
            stop=stop - first,
            t_started=store.t_started[episodes] + start - starts,
            lookback=looks_back,
            terminated=block.terminated[at] & is_end,
            truncated=block.truncated[at] & is_end,
        )
        for place in np.flatnonzero(block.is_cut[at] & is_end).tolist():
            self.custom_data[0, place] = {"cut": True}
        if store.lost:
            for place in self._ended.tolist():
                if (reason := store.lost.get(int(episodes[place]))) is not None:
                    self.custom_data[0, place] = {"lost": reason}

    def gather(self, name: str) -> Tree:
        """A column's rows, one behind the other: a tree of new arrays `any[num_steps, ...]`."""
        self._named(name)
        return self._steps.taken(name, self._rows)

    def last_observations(self) -> Tree:
        """The observation after the last step of every chunk: a tree of new arrays `any[C, ...]`."""
        rows = self.chunks.stop
        observations = map_tree(lambda leaf: leaf[rows, 0], self.columns[Columns.OBS].tree)
        map_tree(lambda leaf, last: leaf.__setitem__(self._ended, last), observations, self._last_obs)
        return observations

    @cached_property
    def _final_items(self) -> dict[tuple[int, int], tuple[Tree, Mapping[str, Any]]]:
        rows = (self.chunks.stop[self._ended] - 1).tolist()
        return {(row, 0): (tree_at(self._last_obs, place), {}) for place, row in enumerate(rows)}

    def describe(self) -> str:
        """A text of the steps, for errors."""
        ids, last = self.layout.episode_id, len(self.chunks.slot) - 1
        return f"{self.num_steps} steps of {self.name}, episodes '{ids(0, 0)}' to '{ids(0, last)}'"
