"""Blocks of episodes in memory, row behind row, of which fragments are views."""

from collections.abc import Mapping
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rollflow.sinks.datasets.arrow_columns import Description, describe_tree, empty_tree
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.space import row_of
from rollflow.stream.data.tree import Tree, map_tree

Ints = NDArray[np.int64]


class EpisodeStore(Protocol):
    """Episodes on a disk, in an order of their own.

    description                          as in `dataset.json`, with the records of the runs
    columns                              name -> description
    observation_space, action_space      None: not known
    version                              of JSON's types; another one where other steps are stored
    num_steps                            i64[E]
    t_started                            i64[E]    steps of the episode before the first that is there
    ids                                  object[E] text
    runs                                 i64[E]    number of the run in the description
    lost                                 episode -> why its environment was lost
    """

    description: dict[str, Any]
    columns: Mapping[str, Description]
    observation_space: gym.Space[Any] | None
    action_space: gym.Space[Any]
    version: Any
    num_steps: Ints
    t_started: Ints
    ids: NDArray[np.object_]
    runs: Ints
    lost: Mapping[int, str]

    def fill(self, episodes: Ints, columns: Mapping[str, Tree], last_obs: Tree | None) -> None:
        """Read the steps of K episodes, one behind the other, into trees of arrays any[S, ...].

        columns     name -> tree; some of the store's `columns`
        last_obs    tree of arrays any[K, ...], for the observation behind each episode's last step; None: not read

        Raises DatasetError, with its name, for a damaged file.
        """
        ...


def columns_of_spaces(observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> dict[str, Description]:
    """The columns of a store that has observations, actions, rewards and flags alone."""
    spaces = {Columns.OBS: observation_space, Columns.ACTIONS: action_space}
    return {
        **{name: describe_tree(row_of(space, 1), name) for name, space in spaces.items()},
        Columns.REWARDS: {"dtype": "float32", "shape": []},
        Columns.TERMINATEDS: {"dtype": "bool", "shape": []},
        Columns.TRUNCATEDS: {"dtype": "bool", "shape": []},
    }


class EpisodeBlock:
    """Steps of K episodes in R rows of memory, one episode behind the other.

    store, episodes        i64[K]
    ordinal                number of the first episode in the order of its pass
    start, stop            i64[K]    rows of each episode; `start` is below 0 where rows before were let go
    columns                name -> tree of arrays any[R, 1, ...]; `obs` has a row more, which has no meaning
    last_obs               tree of arrays any[K, ...]
    terminated, truncated  bool[K]
    is_cut                 bool[K]   of episodes whose end is not stored; they count as truncated
    """

    def __init__(self, store: EpisodeStore, episodes: Ints, ordinal: int, rest: "BlockRest | None" = None) -> None:
        self.store = store
        head = 0 if rest is None else rest.num_rows
        lengths = store.num_steps[episodes]
        stop = head + np.cumsum(lengths)
        self.num_rows: int = int(stop[-1])
        self.columns = {
            name: empty_tree(each, self.num_rows + (name == Columns.OBS)) for name, each in store.columns.items()
        }
        behind = 0 if rest is None else len(rest.episodes)
        self.last_obs = empty_tree(store.columns[Columns.OBS], behind + len(episodes))
        own = {name: map_tree(lambda leaf: leaf[head : self.num_rows], tree) for name, tree in self.columns.items()}
        store.fill(episodes, own, map_tree(lambda leaf: leaf[behind:], self.last_obs))
        self.episodes: Ints = episodes
        self.start: Ints = stop - lengths
        self.stop: Ints = stop
        self.ordinal = ordinal
        if rest is not None:
            rest.copy_to(self)
        ends = self.stop - 1
        flags = [self.columns[name] for name in (Columns.TERMINATEDS, Columns.TRUNCATEDS)]
        self.terminated, truncated = (flag[ends] for flag in flags)
        self.is_cut: NDArray[np.bool_] = ~self.terminated & ~truncated
        if rest is not None:
            self.is_cut[:behind] = rest.is_cut  # these are marked as truncated
        flags[1][ends[self.is_cut]] = True
        self.truncated = truncated | self.is_cut
        self.columns = {name: map_tree(lambda leaf: leaf[:, None], tree) for name, tree in self.columns.items()}

    def ends(self, row: int, size: int, *, whole: bool) -> list[int]:
        """The rows behind each next `size` steps from a row on, as far as there are as many.

        whole    up to the end of the episode in which they end
        """
        ends = range(row + size, self.num_rows + 1, size)
        if not whole:
            return list(ends)
        found: list[int] = []
        while row + size <= self.num_rows:
            row = int(self.stop[np.searchsorted(self.stop, row + size)])
            found.append(row)
        return found

    def place_of(self, row: int) -> tuple[int, int]:
        """The episode that a row is of, as a number in the order of the pass, and the step in it."""
        at = int(np.searchsorted(self.stop, row, "right"))
        return self.ordinal + at, 0 if at == len(self.stop) else row - int(self.start[at])

    def rest(self, row: int, lookback: int) -> "BlockRest | None":
        """What is there from a row on, with some rows before it of the same episode; None: nothing."""
        return BlockRest(self, row, lookback) if row < self.num_rows else None


class BlockRest:
    """Rows at the end of a block, which the next one begins with, copied so that the block itself can go.

    num_rows    in all, with the rows before the first step
    row         of the first step
    episodes    i64[K]
    """

    def __init__(self, block: EpisodeBlock, row: int, lookback: int) -> None:
        at = int(np.searchsorted(block.stop, row, "right"))
        begin = max(row - lookback, int(block.start[at]), 0)
        self.num_rows, self.row = block.num_rows - begin, row - begin
        self.episodes, self.start, self.stop = block.episodes[at:], block.start[at:] - begin, block.stop[at:] - begin
        self.ordinal, self.is_cut = block.ordinal + at, block.is_cut[at:]
        self._columns = {
            name: map_tree(lambda leaf: leaf[begin : block.num_rows, 0].copy(), tree)
            for name, tree in block.columns.items()
        }
        self._last_obs = map_tree(lambda leaf: leaf[at:].copy(), block.last_obs)

    def copy_to(self, block: EpisodeBlock) -> None:
        """Put the rows in front of those of a block, which has room for them."""
        for name, tree in block.columns.items():
            map_tree(lambda leaf, mine: leaf.__setitem__(slice(self.num_rows), mine), tree, self._columns[name])
        map_tree(lambda leaf, mine: leaf.__setitem__(slice(len(mine)), mine), block.last_obs, self._last_obs)
        block.episodes = np.concatenate([self.episodes, block.episodes])
        block.start = np.concatenate([self.start, block.start])
        block.stop = np.concatenate([self.stop, block.stop])
        block.ordinal = self.ordinal
