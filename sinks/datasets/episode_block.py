"""Blocks of episodes in memory, row behind row, of which fragments are made."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, Protocol

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rollflow.sinks.datasets.arrow_columns import Description, describe_tree, empty_tree
from rollflow.sinks.datasets.stored_steps import Ints, StoredSteps
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.space import row_of
from rollflow.stream.data.tree import Tree, map_tree


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

    def read(self, episodes: Ints, names: Collection[str], *, with_last: bool) -> StoredSteps:
        """Read some of the `columns` of K episodes, i64[K], and the observations behind their last steps.

        With these, the states before their first steps as well, where a stateful module has acted.

        Calls `check_wanted` between its parts. Raises DatasetError, with its name, for a damaged file.
        """
        ...


class FilledSteps(NamedTuple):
    """Room for the steps of K episodes, one behind the other, and for their last observations.

    columns     name -> tree of arrays any[S, ...]
    last_obs    tree of arrays any[K, ...]; None: not wanted
    stop        i64[K]    row behind each episode's last step
    """

    columns: dict[str, Tree]
    last_obs: Tree | None
    stop: Ints

    @classmethod
    def of(cls, store: EpisodeStore, episodes: Ints, names: Collection[str], *, with_last: bool) -> "FilledSteps":
        """Room for some columns of these episodes, i64[K], with undefined contents."""
        stop: Ints = np.cumsum(store.num_steps[episodes])
        columns = {name: empty_tree(store.columns[name], int(stop[-1])) for name in names}
        return cls(columns, empty_tree(store.columns[Columns.OBS], len(episodes)) if with_last else None, stop)

    def steps(self) -> StoredSteps:
        """The steps, once they are there."""
        return StoredSteps(
            {name: [tree] for name, tree in self.columns.items()}, np.arange(self.stop[-1]), self.last_obs
        )


def copy_rows(target: Tree, source: Tree, to: Any, rows: Any) -> None:
    """Copy rows of a tree of arrays any[n, ...], as another library reads them, to places of one any[S, ...]."""
    map_tree(lambda leaf, values: leaf.__setitem__(to, np.reshape(values[rows], leaf[to].shape)), target, source)


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
    """Steps of K episodes in memory; a row is a step, and the rows of one episode stand behind those of another.

    store, episodes        i64[K]
    ordinal                number of the first episode in the order of its pass
    start, stop            i64[K]    rows of each episode; `start` is below 0 where rows before were let go
    num_rows               R
    steps                  of the R rows
    terminated, truncated  bool[K]
    is_cut                 bool[K]   of episodes whose end is not stored; they count as truncated
    """

    def __init__(self, store: EpisodeStore, episodes: Ints, ordinal: int, rest: "BlockRest | None" = None) -> None:
        self.store = store
        self.steps: StoredSteps = store.read(episodes, store.columns, with_last=True)
        stop = np.cumsum(store.num_steps[episodes])
        start = stop - store.num_steps[episodes]
        if rest is not None:
            self.steps, ordinal = self.steps.after(rest.steps), rest.ordinal
            episodes = np.concatenate([rest.episodes, episodes])
            start = np.concatenate([rest.start, start + rest.num_rows])
            stop = np.concatenate([rest.stop, stop + rest.num_rows])
        self.episodes: Ints = episodes
        self.start: Ints = start
        self.stop: Ints = stop
        self.ordinal: int = ordinal
        self.num_rows: int = int(stop[-1])
        self.steps.join()
        self.terminated, truncated = (
            self.steps.taken(name, stop - 1) for name in (Columns.TERMINATEDS, Columns.TRUNCATEDS)
        )
        self.is_cut: NDArray[np.bool_] = ~self.terminated & ~truncated
        if rest is not None:
            self.is_cut[: len(rest.episodes)] = rest.is_cut  # these are marked as truncated
        if self.is_cut.any():
            self.steps.write(Columns.TRUNCATEDS, stop[self.is_cut] - 1, True)
        self.truncated = truncated | self.is_cut

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

    num_rows      in all, with the rows before the first step
    row           of the first step
    episodes, ordinal, start, stop, is_cut, steps    as of a block
    """

    def __init__(self, block: EpisodeBlock, row: int, lookback: int) -> None:
        at = int(np.searchsorted(block.stop, row, "right"))
        begin = max(row - lookback, int(block.start[at]), 0)
        self.num_rows, self.row = block.num_rows - begin, row - begin
        self.episodes, self.start, self.stop = block.episodes[at:], block.start[at:] - begin, block.stop[at:] - begin
        self.ordinal, self.is_cut = block.ordinal + at, block.is_cut[at:]
        steps = block.steps
        self.steps = StoredSteps(
            {name: [steps.taken(name, slice(begin, None))] for name in steps.parts},
            np.arange(self.num_rows),
            map_tree(lambda leaf: leaf[at:].copy(), steps.last_obs),
            None if steps.initial is None else map_tree(lambda leaf: leaf[at:].copy(), steps.initial),
        )
