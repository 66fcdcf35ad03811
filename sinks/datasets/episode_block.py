"""Blocks of episodes in memory, row behind row, and the fragments that are made of them."""

import copy
import math
import threading
from asyncio import CancelledError
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from rollflow.sinks.datasets.arrow_columns import Description, empty_tree
from rollflow.stream.data.column import Column
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.tree import Tree, concatenate_trees, leaves_of, map_tree
from rollflow.stream.fragments.fragment import ChunkIndex, Final, Fragment, FragmentLayout

if TYPE_CHECKING:
    from rollflow.sinks.datasets.minari_episodes import MinariEpisodes
    from rollflow.sinks.datasets.parquet_episodes import ParquetEpisodes

Ints = NDArray[np.int64]
T = TypeVar("T")

_JOINED_BYTES = 512  # of a row: larger ones stay in their parts, since to join them takes as long as to take them


class StoredSteps:
    """Steps of K episodes in parts, such as row groups. What is taken is copied once, from there to where it is used.

    parts       name -> the column's parts, trees of arrays any[m, ...]; all columns have parts of the same m
    rows        i64[S]    the row of each step, counted over all parts, episode by episode
    last_obs    tree of arrays any[K, ...], the observation behind each episode's last step; None: not read
    initial     tree of arrays any[K, ...], the state before each episode's first step; None: not read, or not there
    """

    def __init__(
        self,
        parts: Mapping[str, Sequence[Tree]],
        rows: Ints,
        last_obs: Tree | None,
        initial: Tree | None = None,
    ) -> None:
        self.parts = {name: list(trees) for name, trees in parts.items()}
        self.rows, self.last_obs, self.initial = rows, last_obs, initial
        sizes = [len(leaves_of(tree)[0]) for tree in next(iter(self.parts.values()))]
        self._firsts: Ints = np.cumsum([0, *sizes])  # of each part, and behind the last

    def after(self, front: "StoredSteps") -> "StoredSteps":
        """These steps behind others."""
        parts = {name: [*front.parts[name], *trees] for name, trees in self.parts.items()}
        rows = np.concatenate([front.rows, self.rows + front._firsts[-1]])
        lasts = None if self.last_obs is None else concatenate_trees([front.last_obs, self.last_obs])
        initial = None if self.initial is None else concatenate_trees([front.initial, self.initial])
        return StoredSteps(parts, rows, lasts, initial)

    def join(self) -> None:
        """Put the parts of columns with small rows end to end, from which steps are taken faster."""
        for name, trees in self.parts.items():
            if len(trees) > 1 and self.row_bytes(name) <= _JOINED_BYTES:
                self.parts[name] = [concatenate_trees(trees)]

    def row_bytes(self, name: str) -> int:
        """Bytes of one step in a column."""
        return sum(leaf.itemsize * math.prod(leaf.shape[1:]) for leaf in leaves_of(self.parts[name][0]))

    def write(self, name: str, steps: Ints, value: Any) -> None:
        """Set the value of some steps, i64[n], in a column of numbers."""
        tree = self.parts[name] = [np.concatenate(self.parts[name])]
        tree[0][self.rows[steps]] = value

    def taken(self, name: str, steps: Ints | slice = slice(None)) -> Tree:
        """A column's values at some steps, i64[n] or a slice of all: a tree of new arrays any[n, ...]."""
        rows, trees = self.rows[steps], self.parts[name]
        if len(trees) == 1:
            # All rows are there; the mode "raise" would check each of them first.
            return map_tree(lambda leaf: leaf.take(rows, axis=0, mode="clip"), trees[0])
        values = map_tree(lambda leaf: np.empty((len(rows), *leaf.shape[1:]), leaf.dtype), trees[0])
        part = np.searchsorted(self._firsts, rows, "right") - 1
        ends = np.flatnonzero((np.diff(rows) != 1) | (np.diff(part) != 0)) + 1
        for begin, end in pairwise([0, *ends.tolist(), len(rows)] if len(rows) else []):
            at = int(part[begin])
            first = int(rows[begin] - self._firsts[at])
            map_tree(lambda leaf, value, b=begin, e=end, f=first: _copy(leaf, f, value[b:e]), trees[at], values)
        return values


class ReadAhead(threading.Thread, Generic[T]):
    """A thread that reads something while others work on what came before.

    read    gives it, and calls `check_wanted` now and then
    """

    def __init__(self, read: Callable[[], T]) -> None:
        super().__init__(name="rollflow-dataset")
        self._read, self.is_wanted = read, True
        self._made: Future[T] = Future()
        self.start()

    def run(self) -> None:
        """Read it."""
        try:
            self._made.set_result(self._read())
        except BaseException as error:
            self._made.set_exception(error)

    def result(self) -> T:
        """Wait for what was read. Raises what reading it has raised."""
        self.join()
        return self._made.result()

    def stop(self) -> None:
        """Wait until the thread has ended, which reads no further."""
        self.is_wanted = False
        self.join()


def check_wanted() -> None:
    """End a thread that reads ahead, if nobody wants any more what it reads; else do nothing."""
    thread = threading.current_thread()
    if isinstance(thread, ReadAhead) and not thread.is_wanted:
        raise CancelledError


def in_pairs(reads: Sequence[Callable[[], T]]) -> Generator[T, None, None]:
    """What each of some functions gives, in their order. Two at a time are at work, every second one in a thread."""
    for at in range(0, len(reads), 2):
        check_wanted()
        beside = ReadAhead(reads[at + 1]) if at + 1 < len(reads) else None
        try:
            yield reads[at]()
            if beside is not None:
                yield beside.result()
        finally:
            if beside is not None:
                beside.stop()


def _copy(leaf: NDArray[Any], first: int, into: NDArray[Any]) -> None:
    into[:] = leaf[first : first + len(into)]


EpisodeStore: TypeAlias = "ParquetEpisodes | MinariEpisodes"
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

`read(episodes, names, with_last=)` gives some of the `columns` of K episodes, i64[K], and the observations behind their
last steps; with these, the states before their first steps as well, if a stateful module has acted. It calls
`check_wanted` between its parts, and raises DatasetError, with its name, for a damaged file.
"""


class EpisodeRows:
    """Rows of K episodes in memory, one episode behind the other.

    ordinal        number of the first episode in the order of its pass
    row            of the first step that no fragment has
    episodes       i64[K]
    start, stop    i64[K]    rows of each episode; `start` is below 0 if rows before were let go
    num_rows       R
    """

    ordinal: int
    row = 0
    episodes: Ints
    start: Ints
    stop: Ints
    num_rows: int
    _heads: Ints = np.empty(0, np.int64)  # rows at which a fragment has to begin

    def ends(self, row: int, size: int, *, whole: bool) -> list[int]:
        """The rows behind each next `size` steps from a row on, as far as there are as many, or a fragment has to end.

        whole    up to the end of the episode in which they end
        """
        heads = [*self._heads[self._heads > row].tolist(), self.num_rows + size]
        found, head = [], 0
        while (end := min(row + size, heads[head])) <= self.num_rows:
            if end < heads[head] and whole:
                end = min(int(self.stop[np.searchsorted(self.stop, end)]), heads[head])
            found.append(end)
            head += end == heads[head]
            row = end
        return found

    def place_of(self, row: int) -> tuple[int, int]:
        """The episode that a row is of, as a number in the order of the pass, and the step in it."""
        at = int(np.searchsorted(self.stop, row, "right"))
        return self.ordinal + at, 0 if at == len(self.stop) else row - int(self.start[at])


class EpisodeBlock(EpisodeRows):
    """Steps of K episodes in memory; a row is a step, and the rows of one episode stand behind those of another.

    store                  of the episodes
    front                  rows at the end of the block before, as its `rest` gave them
    more                   names of columns that are read beside those of the store
    steps                  of the R rows
    terminated, truncated  bool[K]
    is_cut                 bool[K]   of episodes whose end is not stored; they count as truncated
    """

    def __init__(
        self,
        store: EpisodeStore,
        episodes: Ints,
        ordinal: int,
        front: "EpisodeBlock | None" = None,
        more: Sequence[str] = (),
    ) -> None:
        self.store = store
        self.steps: StoredSteps = store.read(episodes, [*store.columns, *more], with_last=True)
        stop = np.cumsum(store.num_steps[episodes])
        start = stop - store.num_steps[episodes]
        if front is not None:
            self.steps, ordinal, self.row = self.steps.after(front.steps), front.ordinal, front.row
            episodes = np.concatenate([front.episodes, episodes])
            start = np.concatenate([front.start, start + front.num_rows])
            stop = np.concatenate([front.stop, stop + front.num_rows])
        self.episodes = episodes
        self.start, self.stop, self.ordinal, self.num_rows = start, stop, ordinal, int(stop.max(initial=0))
        self.steps.join()
        self.terminated, truncated = (
            self.steps.taken(name, stop - 1) for name in (Columns.TERMINATEDS, Columns.TRUNCATEDS)
        )
        self.is_cut: NDArray[np.bool_] = ~self.terminated & ~truncated
        if front is not None:
            self.is_cut[: len(front.episodes)] = front.is_cut  # these are marked as truncated
        if self.is_cut.any():
            self.steps.write(Columns.TRUNCATEDS, stop[self.is_cut] - 1, True)
        self.truncated = truncated | self.is_cut

    def rest(self, row: int, lookback: int) -> "EpisodeBlock | None":
        """A block of what is there from a row on, with some rows before it of the same episode; None: nothing.

        Its steps are copies, so that this block can go.
        """
        if row >= self.num_rows:
            return None
        at = int(np.searchsorted(self.stop, row, "right"))
        begin = max(row - lookback, int(self.start[at]), 0)
        rest, steps = copy.copy(self), self.steps
        rest.num_rows, rest.row, rest.ordinal = self.num_rows - begin, row - begin, self.ordinal + at
        rest.start, rest.stop = self.start[at:] - begin, self.stop[at:] - begin
        rest.episodes, rest.is_cut = self.episodes[at:], self.is_cut[at:]
        rest.terminated, rest.truncated = self.terminated[at:], self.truncated[at:]
        rest.steps = StoredSteps(
            {name: [steps.taken(name, slice(begin, None))] for name in steps.parts},
            np.arange(rest.num_rows),
            map_tree(lambda leaf: leaf[at:].copy(), steps.last_obs),
            None if steps.initial is None else map_tree(lambda leaf: leaf[at:].copy(), steps.initial),
        )
        return rest


_NEEDED = (Columns.REWARDS, Columns.TERMINATEDS, Columns.TRUNCATEDS, Columns.POLICY_VERSION)
STEPS_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class EpisodeSummary:
    """What a dataset's E episodes are like, in the order of their numbers.

    returns            f64[E]    sum of the rewards that are stored
    lengths            i64[E]    steps that are stored
    runs               i64[E]    number of the run in the description
    is_whole           bool[E]   whether beginning and end are stored
    oldest_version     i64[E]    the oldest policy version that an action was computed with; 0 if it is not stored
    newest_version     i64[E]
    """

    returns: NDArray[np.float64]
    lengths: Ints
    runs: Ints
    is_whole: NDArray[np.bool_]
    oldest_version: Ints
    newest_version: Ints


def summary_of(store: EpisodeStore) -> EpisodeSummary:
    """Read the rewards, flags and policy versions of all episodes. Raises DatasetError for a damaged file."""
    count = len(store.num_steps)
    returns, is_whole = np.zeros(count), store.t_started == 0
    oldest, newest = np.zeros(count, np.int64), np.zeros(count, np.int64)
    columns = {name: store.columns[name] for name in _NEEDED if name in store.columns}
    for episodes in windows_of(store.num_steps, np.arange(count), STEPS_AT_ONCE):
        lengths = store.num_steps[episodes]
        steps = store.read(episodes, columns, with_last=False)
        read = {name: steps.taken(name) for name in columns}
        begins, ends = np.cumsum(lengths) - lengths, np.cumsum(lengths) - 1
        returns[episodes] = np.add.reduceat(read[Columns.REWARDS].astype(np.float64), begins)
        is_whole[episodes] &= read[Columns.TERMINATEDS][ends] | read[Columns.TRUNCATEDS][ends]
        if Columns.POLICY_VERSION in read:
            oldest[episodes] = np.minimum.reduceat(read[Columns.POLICY_VERSION], begins)
            newest[episodes] = np.maximum.reduceat(read[Columns.POLICY_VERSION], begins)
    return EpisodeSummary(returns, store.num_steps, store.runs, is_whole, oldest, newest)


def mark_end(custom_data: dict[Any, dict[Any, Any]], key: Any, *, is_cut: bool, lost: str | None) -> None:
    """Note in an episode's data how it has ended, unless the environment ended it.

    is_cut    whether the end is missing
    lost      why the environment was lost
    """
    if lost is not None:
        custom_data[key] = {"lost": lost}
    elif is_cut:
        custom_data[key] = {"cut": True}


def windows_of(num_steps: Ints, episodes: Ints, window_steps: int) -> list[Ints]:
    """Episodes, i64[K], in groups of about so many steps that stand one behind the other.

    num_steps    i64[E]    of all episodes
    """
    window = (np.cumsum(num_steps[episodes]) - 1) // window_steps
    return [each for each in np.split(episodes, np.flatnonzero(np.diff(window)) + 1) if len(each)]


def step_bytes(columns: Mapping[str, Description]) -> int:
    """Bytes of one step in memory."""
    return sum(leaf.nbytes for each in columns.values() for leaf in leaves_of(empty_tree(each, 1)))


def histogram(values: NDArray[Any], bins: int = 10, width: int = 40) -> Iterator[str]:
    """Lines of a histogram of values, any[E]: the range of each bin, a bar, and how many values are in it."""
    if not len(values):
        return
    low, high = values.min(), values.max()
    if np.all(values == np.round(values)) and max(abs(low), abs(high)) < 2**53:
        size = int((high - low) // bins + 1)
        edges = np.arange(low, high + size + 1, size)
        names = [f"{first:.0f}" + (f" … {first + size - 1:.0f}" if size > 1 else "") for first in edges[:-1]]
    else:
        edges = np.linspace(low / 2, high / 2, bins + 1) * 2  # between the largest numbers is more than a float holds
        names = [f"{first:.4g} … {second:.4g}" for first, second in pairwise(edges)]
    counts, _ = np.histogram(values, edges)
    wide = max(map(len, names))
    for name, count in zip(names, counts.tolist(), strict=True):
        bar = "█" * -(-count * width // int(counts.max()))
        yield f"  {name:>{wide}}  {bar:<{width}}  {count}".rstrip()


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
