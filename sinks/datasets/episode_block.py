"""Blocks of episodes in memory, row behind row, of one agent or several, and the fragments that are made of them."""

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
from rollflow.sinks.datasets.dataset_folder import ENV_T
from rollflow.stream.data.column import Column
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.tree import Tree, concatenate_trees, leaves_of, map_tree
from rollflow.stream.fragments.fragment import RECORDED, ChunkIndex, Final, Fragment, FragmentLayout
from rollflow.stream.multi_agent.agent_fragment import AgentFragment, EnvClock
from rollflow.stream.multi_agent.agent_part import AgentPart
from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment

if TYPE_CHECKING:
    from rollflow.sinks.datasets.minari_episodes import MinariEpisodes
    from rollflow.sinks.datasets.parquet_episodes import EnvEpisodes, ModuleEpisodes, ParquetEpisodes

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


def ranges(starts: Ints, lengths: Ints) -> Ints:
    """The numbers start … start + length - 1 of each of K ranges, end to end: i64[sum(lengths)]."""
    shifts: Ints = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    return np.arange(int(lengths.sum())) + shifts


def step_bytes(columns: Mapping[str, Description]) -> int:
    """Bytes of one step in memory."""
    return sum(leaf.nbytes for each in columns.values() for leaf in leaves_of(empty_tree(each, 1)))


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


class ModuleSteps(EpisodeBlock):
    """Steps of one module's agents in a block, J episodes of agents one behind the other.

    module                 where they are stored
    place, slot            i64[J]    environment's episode in the block, ascending, and place in `module.agents`
    seen, done             i64[R]    row of the block at which a step's observation came, and at which the next one did
    last_seen              i64[J]    row at which the last observation came
    t_started              i64[J]    steps of the agent's episode before the first
    """

    def __init__(self, module: "ModuleEpisodes", places: Ints, starts: Ints) -> None:
        mine = np.flatnonzero(places[module.piece] >= 0)
        mine = mine[np.lexsort((module.agent[mine], places[module.piece[mine]]))]
        super().__init__(module, mine, 0, more=[ENV_T])
        self.module = module
        self.place, self.slot = places[module.piece[mine]], module.agent[mine]
        begin = starts[self.place]
        self.seen: Ints = self.steps.taken(ENV_T) + np.repeat(begin, self.stop - self.start)
        self.last_seen: Ints = module.last_t[mine] + begin
        self.done = np.empty_like(self.seen)
        self.done[:-1] = self.seen[1:]
        self.done[self.stop - 1] = self.last_seen
        self.t_started: Ints = module.t_started[mine]

    def until(self, first: int, last: int, row: int) -> Ints:
        """The step at which each episode in first … last - 1 stands at a row, i64[K]; behind its last: it is over."""
        start, stop = self.start[first:last], self.stop[first:last]
        begin, end = (int(start[0]), int(stop[-1])) if last > first else (0, 0)
        made = np.zeros(end - begin + 1, np.int64)
        np.cumsum(self.done[begin:end] <= row, out=made[1:])
        until: Ints = start + made[stop - begin] - made[start - begin]
        return until


class AgentsBlock(EpisodeRows):
    """Env steps of K environments' episodes, one behind the other; a row is a vector step of one environment.

    store      of the episodes
    front      those at the end of the block before, as its `rest` gave them
    modules    steps of each module's agents
    """

    def __init__(self, store: "EnvEpisodes", episodes: Ints, ordinal: int, front: "AgentsBlock | None" = None) -> None:
        if front is not None:
            episodes, ordinal = np.concatenate([front.episodes, episodes]), front.ordinal
            self.row = front.row
        lengths = store.num_steps[episodes]
        self.store, self.ordinal, self.episodes = store, ordinal, episodes
        self.stop = np.cumsum(lengths)
        self.start = self.stop - lengths
        self.num_rows = int(self.stop[-1])
        places = np.full(len(store.num_steps), -1)
        places[episodes] = np.arange(len(episodes))
        self.modules = [ModuleSteps(each, places, self.start - store.t_started[episodes]) for each in store.modules]
        # One environment can't begin an episode in its midst behind another: such a one begins a fragment.
        self._heads = self.start[store.t_started[episodes] > 0]

    def rest(self, row: int, lookback: int) -> "AgentsBlock | None":
        """A block without steps, of the episodes from a row on, which are read again; None: there are none."""
        if row >= self.num_rows:
            return None
        at = int(np.searchsorted(self.stop, row, "right"))
        rest = copy.copy(self)
        rest.episodes, rest.ordinal, rest.modules = self.episodes[at:], self.ordinal + at, []
        rest.row = row - int(self.start[at])
        return rest


class StoredAgents(MultiAgentFragment):
    """Fragment of stored env steps: one environment, whose episodes stand one behind the other.

    block       in which the rows lie
    begin, end  rows of the env steps
    lookback    steps of an agent before the first that its episode may show
    sequence    number of the fragment
    name        of the dataset, for errors

    dataset     that the steps are from
    runs        i64[M]    number of the run there of each environment's chunk

    Each module's agents are a part. What an agent has received since its last observation stands in its next step.
    """

    def __init__(self, block: AgentsBlock, begin: int, end: int, *, lookback: int, sequence: int, name: str) -> None:
        first, last = int(np.searchsorted(block.stop, begin, "right")), int(np.searchsorted(block.start, end))
        store, episodes = block.store, block.episodes[first:last]
        started = int(block.start[first] - store.t_started[episodes[0]])
        ids = [*store.ids[episodes].tolist(), ""]  # one that begins with the last end has no step here
        ends: list[tuple[int, int, bool, bool]] = []
        custom_data: dict[tuple[int, int], dict[Any, Any]] = {}
        for nth, (stop, episode) in enumerate(zip(block.stop[first:last].tolist(), episodes.tolist(), strict=True)):
            if stop <= end:
                terminated, truncated = store.terminated[episode], store.truncated[episode]
                ends.append((stop, 0, not terminated, False))
                is_cut = not terminated and not truncated
                mark_end(custom_data, (0, nth), is_cut=is_cut, lost=store.lost.get(episode))
        clock = EnvClock(begin, np.array([started]), np.zeros(1, np.int64), lambda env, nth: str(ids[nth]), ends)
        super().__init__(
            0,
            sequence,
            [_part(each, (first, last), (begin, end), lookback, sequence, clock) for each in block.modules],
            num_rows=end - begin,
            clock=clock,
            custom_data=custom_data,
        )
        self.dataset: EnvEpisodes = store
        self.runs: Ints = store.runs[episodes]
        self._name = name

    def __repr__(self) -> str:
        return f"<fragment of {self.num_rows} env steps of {self._name}>"


def _part(
    steps: ModuleSteps,
    places: tuple[int, int],
    rows: tuple[int, int],
    lookback: int,
    sequence: int,
    env_clock: EnvClock,
) -> AgentFragment:
    """The steps of one module's agents that were made in some rows of a block.

    places       environments' episodes in the block
    env_clock    of the environment

    K episodes of agents have a step in these rows, or wait at their end, slot by slot, in a slot by time.
    """
    module, slots, (first_row, last_row) = steps.module, len(steps.module.agents), rows
    low, high = (int(each) for each in np.searchsorted(steps.place, places))
    done, until = steps.until(low, high, first_row), steps.until(low, high, last_row)
    seen = steps.seen[np.minimum(until, max(steps.num_rows - 1, 0))] if high > low else until
    pending = (until < steps.stop[low:high]) & (seen <= last_row)
    # Without a step in these rows an agent would show lookback that may not be stored.
    unseen = (until == done) & (steps.t_started[low:high] > 0) & (done - steps.start[low:high] < lookback)
    kept = np.flatnonzero(((until > done) | pending) & ~unseen)
    kept = kept[np.argsort(steps.slot[low + kept], kind="stable")]
    which = kept + low  # i64[K], as are the following ones
    slot, done, until, pending, seen = steps.slot[which], done[kept], until[kept], pending[kept], seen[kept]
    heads = np.searchsorted(slot, slot)
    number = np.arange(len(kept)) - heads
    begins_at = np.cumsum(until - done + 1) - (until - done) - 1
    start = lookback + begins_at - begins_at[heads]
    stop = start + until - done  # the row that has the observation behind the last step
    back = np.minimum(done - steps.start[which], lookback)
    before = steps.t_started[which] + done - steps.start[which]  # steps of the episode
    waits, acts = pending & (seen < last_row), pending & (seen == last_row)
    is_over = until == steps.stop[which]
    num_rows = int(stop.max(initial=lookback)) + 1
    lengths = back + until - done + pending
    source, to, at_slot = ranges(done - back, lengths), ranges(start - back, lengths), np.repeat(slot, lengths)

    def scattered(items: Any) -> Any:
        """Items of the steps that are copied, any[R, ...], where they go to: a new array any[rows, slots, ...]."""
        array = np.zeros((num_rows, slots, *items.shape[1:]), items.dtype)
        array[to, at_slot] = items
        return array

    keys = list(zip(slot.tolist(), number.tolist(), strict=True))
    ids = {key: str(module.ids[each]) for key, each in zip(keys, steps.episodes[which].tolist(), strict=True)}
    # A slot without an episode here has no id; nor is one asked for, but of the first, by which lanes are told apart.
    layout = FragmentLayout(
        slots,
        num_rows - 1 - lookback,
        lookback,
        module.action_space,
        False,
        lambda slot, number: ids.get((slot, number), ""),
    )
    trees = {name: map_tree(scattered, steps.steps.taken(name, source)) for name in module.columns}
    clock = scattered(steps.seen[source])
    closed = np.flatnonzero(~(waits | acts))
    at = stop[closed], slot[closed]
    map_tree(lambda leaf, last: leaf.__setitem__(at, last[which[closed]]), trees[Columns.OBS], steps.steps.last_obs)
    clock[at] = steps.last_seen[which[closed]]
    starts = np.full(slots, lookback)
    starts[slot[number == 0]] = (start - before)[number == 0]
    part = AgentFragment(
        layout,
        0,
        sequence,
        {name: Column(name, tree) for name, tree in trees.items()},
        starts,
        part=AgentPart(module.agents, module.observation_space, module.action_space),
        env_clock=env_clock,
        clock=clock,
        module_of=np.zeros((num_rows, slots), np.int16),
    )
    part.observation_space = module.observation_space
    has_steps = start < stop
    part.chunks = ChunkIndex(
        slot=slot[has_steps],
        number=number[has_steps],
        start=start[has_steps],
        stop=stop[has_steps],
        t_started=before[has_steps],
        lookback=back[has_steps],
        terminated=(steps.terminated[which] & is_over)[has_steps],
        truncated=(steps.truncated[which] & is_over)[has_steps],
    )
    extra = [name for name in module.columns if name not in (Columns.OBS, *RECORDED, Columns.POLICY_VERSION)]
    part.module_ids, part.outputs = (module.module_id,), {module.module_id: extra}
    if steps.steps.initial is not None:
        begins = np.flatnonzero(before == 0)
        states = map_tree(lambda leaf: leaf[which[begins]], steps.steps.initial)
        part.record_starts(start[begins], slot[begins], states)
    part.waits, part.acts = np.zeros(slots, np.bool_), np.zeros(slots, np.bool_)
    part.waits[slot[waits]] = part.acts[slot[acts]] = True
    for place in np.flatnonzero(is_over).tolist():
        key, episode = keys[place], int(which[place])
        part.ends[int(stop[place]) - 1, key[0]] = int(steps.last_seen[episode])
        lost = module.lost.get(int(steps.episodes[episode]))
        mark_end(part.custom_data, key, is_cut=bool(steps.is_cut[episode]), lost=lost)
    stops = np.full(slots, lookback)
    stops[slot] = stop  # of the last in each slot
    part.seal_at(stops)
    return part
