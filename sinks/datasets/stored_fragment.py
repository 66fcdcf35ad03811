"""Fragments made of stored episodes."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollflow.sinks.datasets.episode_block import EpisodeBlock, EpisodeStore, Ints, StoredSteps, mark_end
from rollflow.stream.data.column import Column
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.tree import Tree, map_tree
from rollflow.stream.fragments.fragment import ChunkIndex, Final, Fragment, FragmentLayout


class StoredColumns(Mapping[str, Column]):
    """Columns of steps, each of which is taken and made read-only when it is first looked at. Copies have all of them.

    steps    that they are of
    rows     name -> steps, i64[rows]
    """

    def __init__(self, steps: StoredSteps, rows: Mapping[str, Ints]) -> None:
        self.steps, self._rows = steps, rows
        self._made: dict[str, Column] = {}

    @property
    def nbytes(self) -> int:
        """Bytes in the columns, once all of them are there."""
        return sum(self.steps.row_bytes(name) * len(rows) for name, rows in self._rows.items())

    def __getitem__(self, name: str) -> Column:
        if name not in self._made:
            taken = self.steps.taken(name, self._rows[name])
            column = Column(name, map_tree(lambda leaf: leaf[:, None], taken))
            column.seal()
            self._made.setdefault(name, column)  # the one that stays, if another thread has made it as well
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def _id_among(ids: NDArray[np.object_], slot: int, number: int) -> str:
    """The id of the episode of this number."""
    return str(ids[number])


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
        layout = FragmentLayout(
            1, end - begin, before, store.action_space, False, partial(_id_among, store.ids[episodes])
        )
        first = begin - before
        self._taken = slice(begin, end)
        rows = np.arange(first, end)
        behind = np.append(rows, min(end, block.num_rows - 1))  # an episode's own last observation is not in the column
        columns: Any = StoredColumns(
            block.steps, {name: behind if name == Columns.OBS else rows for name in block.steps.parts}
        )
        super().__init__(layout, 0, sequence, columns)
        self.observation_space, self.name = store.observation_space, name
        self.dataset: EpisodeStore = store
        self.runs: Ints = store.runs[episodes]
        start, stop = np.maximum(starts, begin), np.minimum(stops, end)
        is_end = stop == stops
        ended = np.flatnonzero(is_end)
        last_obs = map_tree(lambda leaf: leaf[at][ended], block.steps.last_obs)
        self.finals = [Final(stop[ended] - 1 - first, np.zeros_like(ended), last_obs, {})]
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
        if block.steps.initial is not None:
            begins = np.flatnonzero(self.chunks.t_started == 0)
            rows = self.chunks.start[begins]
            states = map_tree(lambda leaf: leaf[at][begins], block.steps.initial)
            self.record_starts(rows, np.zeros_like(rows), states)
        for place, episode in zip(ended.tolist(), episodes[is_end].tolist(), strict=True):
            is_cut = bool(block.is_cut[at.start + place])
            mark_end(self.custom_data, (0, place), is_cut=is_cut, lost=store.lost.get(episode))

    def gather(self, name: str) -> Tree:
        """A column's rows, one behind the other: a tree of new arrays `any[num_steps, ...]`."""
        columns = self.columns
        if not isinstance(columns, StoredColumns) or name not in columns:
            return super().gather(name)
        return columns.steps.taken(name, self._taken)

    @property
    def nbytes(self) -> int:
        """Bytes in the columns."""
        return self.columns.nbytes if isinstance(self.columns, StoredColumns) else super().nbytes

    def describe(self) -> str:
        """A text of the steps, for errors."""
        ids, last = self.layout.episode_id, len(self.chunks.slot) - 1
        return f"{self.num_steps} steps of {self.name}, episodes '{ids(0, 0)}' to '{ids(0, last)}'"
