"""Fragments made of stored episodes: blocks of episodes in memory, and the parts of them that a fragment takes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rollflow.sinks.datasets.arrow_columns import Description, tree_of
from rollflow.sinks.datasets.dataset_folder import EPISODES, STEPS, DatasetFolder
from rollflow.sinks.datasets.dataset_sink import LAST_OBS
from rollflow.sinks.datasets.episode_index import UNREADABLE, EpisodeIndex, Ints, damaged, open_file, ranges
from rollflow.stream.data.column import Column
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.tree import Tree, concatenate_trees, leaves_of, map_tree
from rollflow.stream.fragments.fragment import Fragment, FragmentLayout
from rollflow.stream.fragments.fragment_records import ChunkIndex


class EpisodeBlock:
    """Steps of some episodes, in memory.

        folder, index    of the dataset
        columns          name -> description
        episodes         i64[K]

        steps            name -> tree of arrays any[S, ...], chunk by chunk, as they lie in the files
        last_obs         tree of arrays any[C, ...]: the observation behind each chunk

    Raises DatasetError, with its name, for a damaged file.
    """

    def __init__(
        self, folder: DatasetFolder, index: EpisodeIndex, columns: Mapping[str, Description], episodes: Ints
    ) -> None:
        self._index = index
        chunks = np.sort(index.chunks_of(episodes))
        self._chunks, lengths = chunks, index.chunk_steps[chunks]
        self._begins = np.cumsum(lengths) - lengths
        parts: list[dict[str, Tree]] = []
        lasts: list[Tree] = []
        groups, firsts = np.unique(index.group[chunks], return_index=True)
        for group, mine in zip(groups.tolist(), np.split(chunks, firsts[1:]), strict=True):
            number, in_file = index.groups[group]
            steps = _read(folder, STEPS, number, in_file, columns)
            rows = ranges(index.row[mine], index.chunk_steps[mine])
            is_whole = len(rows) == len(leaves_of(steps[Columns.REWARDS])[0])  # then the rows are all, in their order
            parts.append(steps if is_whole else {name: _taken(tree, rows) for name, tree in steps.items()})
            last = _read(folder, EPISODES, number, in_file, {LAST_OBS: columns[Columns.OBS]})
            lasts.append(_taken(last[LAST_OBS], index.place[mine]))
        self.steps = {name: concatenate_trees([part[name] for part in parts]) for name in columns}
        self.last_obs = concatenate_trees(lasts)

    def rows(self, episode: int) -> Ints:
        """The rows of an episode's steps in `steps`: i64[n]."""
        chunks = self._index.chunks_of(np.array([episode]))
        return ranges(self._begins[np.searchsorted(self._chunks, chunks)], self._index.chunk_steps[chunks])

    def last_row(self, episode: int) -> int:
        """The row of an episode's last observation in `last_obs`."""
        return int(np.searchsorted(self._chunks, self._index.last[episode]))


@dataclass(frozen=True, slots=True)
class Part:
    """Steps `start` to `stop` of an episode of a block, with `lookback` steps before them."""

    block: EpisodeBlock
    episode: int
    start: int
    stop: int
    lookback: int


@dataclass(frozen=True, slots=True)
class StoredIds:
    """Ids of a fragment's episodes by their numbers."""

    ids: tuple[str, ...]

    def __call__(self, slot: int, number: int) -> str:
        """The id of the episode of this number; there is one slot."""
        return self.ids[number]


class StoredFragment(Fragment):
    """Fragment of stored steps: one slot in which parts of episodes stand one behind the other.

    Each part takes rows for its lookback, for its steps, and one more for the observation behind them.
    """

    source = "a dataset"

    def describe(self) -> str:
        """A text of the steps, for errors."""
        chunks = self.chunks
        ids = self.layout.episode_id
        first, last = (f"'{ids(0, each)}'" for each in (0, len(chunks.slot) - 1))
        return f"{self.num_steps} steps of {self.source}, episodes {first} to {last}"


def fragment_of(
    parts: Sequence[Part],
    index: EpisodeIndex,
    spaces: tuple[gym.Space[Any] | None, gym.Space[Any]],
    sequence: int,
    source: str,
) -> StoredFragment:
    """The fragment of some parts of episodes.

    spaces      of observations and actions
    sequence    number of the fragment
    source      text that names the dataset
    """
    lookback = np.array([part.lookback for part in parts])
    lengths = np.array([part.stop - part.start for part in parts])
    sizes = lookback + lengths + 1
    start = np.cumsum(sizes) - sizes + lookback
    episodes = np.array([part.episode for part in parts])
    at_end = np.array([part.stop for part in parts]) == index.num_steps[episodes]
    terminated, truncated = at_end & index.terminated[episodes], at_end & index.truncated[episodes]
    cut = at_end & ~terminated & ~truncated
    columns = _gathered(parts, start + lengths, at_end)
    columns[Columns.TRUNCATEDS][(start + lengths)[cut] - 1, 0] = True
    num_rows = int(sizes.sum()) - 1
    columns |= {name: map_tree(lambda leaf: leaf[:num_rows], columns[name]) for name in columns if name != Columns.OBS}
    ids = StoredIds(tuple(str(each) for each in index.ids[episodes]))
    layout = FragmentLayout(1, num_rows, 0, spaces[1], False, ids)
    made = {name: Column(name, tree) for name, tree in columns.items()}
    no_slot = np.zeros(1, np.int64)
    fragment = StoredFragment(layout, 0, sequence, made, episode_start=no_slot, episode_number=no_slot)
    fragment.source, fragment.observation_space = source, spaces[0]
    begun = np.array([part.start for part in parts])
    fragment.chunks = ChunkIndex(
        slot=np.zeros(len(parts), np.int64),
        number=np.arange(len(parts)),
        start=start,
        stop=start + lengths,
        t_started=index.t_started[episodes] + begun,
        lookback=lookback,
        terminated=terminated,
        truncated=truncated | cut,
    )
    for place in np.flatnonzero(at_end).tolist():
        if cut[place]:
            fragment.custom_data[0, place] = {"cut": True}
        elif (reason := index.lost.get(int(episodes[place]))) is not None:
            fragment.custom_data[0, place] = {"lost": reason}
    fragment.seal(num_rows)
    return fragment


def _gathered(parts: Sequence[Part], stops: Ints, at_end: NDArray[np.bool_]) -> dict[str, Tree]:
    """The rows of some parts, a tree of arrays any[R, 1, ...] for each column.

    stops     i64[P]     row of the observation behind each part
    at_end    bool[P]    whether it is the last one of the episode
    """
    trees: list[dict[str, Tree]] = []
    lasts: list[Tree] = []
    begin = 0
    while begin < len(parts):
        block, end = parts[begin].block, begin
        rows, last_rows = [], []
        while end < len(parts) and parts[end].block is block:
            part = parts[end]
            own = block.rows(part.episode)
            rows.append(own[part.start - part.lookback : part.stop + 1])
            if part.stop == len(own):
                rows.append(own[-1:])  # its observation is put in the place of this one
                last_rows.append(block.last_row(part.episode))
            end += 1
        taken = np.concatenate(rows)
        trees.append({name: _taken(tree, taken) for name, tree in block.steps.items()})
        lasts.append(_taken(block.last_obs, np.array(last_rows, np.int64)))
        begin = end
    columns = {name: concatenate_trees([tree[name] for tree in trees]) for name in trees[0]}
    places = stops[at_end]
    for leaf, last in zip(leaves_of(columns[Columns.OBS]), leaves_of(concatenate_trees(lasts)), strict=True):
        leaf[places] = last
    return {name: map_tree(lambda leaf: leaf[:, None], tree) for name, tree in columns.items()}


def _taken(tree: Tree, rows: Ints) -> Tree:
    return map_tree(lambda leaf: leaf.take(rows, axis=0), tree)


def _read(
    folder: DatasetFolder, kind: str, number: int, group: int, columns: Mapping[str, Description]
) -> dict[str, Tree]:
    """The columns of one row group: name -> tree of arrays any[n, ...]."""
    with open_file(folder, kind, number) as file:
        try:
            table = file.read_row_group(group, columns=list(columns), use_threads=False)
            return {name: tree_of(table.column(name), description) for name, description in columns.items()}
        except UNREADABLE as error:
            raise damaged(folder.file(kind, number), error) from None
