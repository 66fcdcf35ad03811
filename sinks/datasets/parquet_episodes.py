"""Episodes of a dataset in Parquet files, read row group by row group."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import numpy as np

from rollflow.sinks.datasets.arrow_columns import Description, empty_tree, import_pyarrow, tree_of
from rollflow.sinks.datasets.dataset_folder import (
    ENV_EPISODES,
    ENV_EPS_ID,
    ENV_T,
    EPISODES,
    LAST_OBS,
    MARK,
    STEPS,
    DatasetFolder,
    no_steps,
    stored_ids,
)
from rollflow.sinks.datasets.episode_block import (
    STEPS_AT_ONCE,
    EpisodeSummary,
    Ints,
    StoredSteps,
    in_pairs,
    ranges,
    step_bytes,
    windows_of,
)
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import DatasetError
from rollflow.stream.data.tree import Tree, map_tree

# What reading a file raises that is not as the sink has written it; the last two: a column of another type.
UNREADABLE = (OSError, ValueError, KeyError, AttributeError, TypeError)

_COLUMNS = ["run", Columns.EPS_ID, "t_started", "num_steps", "terminated", "truncated", "lost"]


class ParquetEpisodes:
    """E episodes of committed files, in the order of their first steps, and the P chunks that they consist of.

    Those of one agent, or of a module, are an `EpisodeStore`; those of environments have no steps to be read.

    Chunks of a run with one episode's id are one episode if each begins at the step at which the one before ended.
    If the beginning is missing, `t_started` is above 0. If the end is missing, the episode is cut.

        folder     of the dataset, or of a module
        kind       of the files that have the chunks, `EPISODES` or `ENV_EPISODES`
        more       names of further columns to be read
        piece_of   gives a number for each chunk of a table, i64[P]: chunks with different ones are no episode

        version              numbers of the files
        group                i64[P]     number of each chunk's row group, counted over all files
        row                  i64[P]     of the chunk's first step in the row group
        place                i64[P]     of the chunk among those of the row group
        chunk_steps          i64[P]
        groups               (file, row group in the file) of each row group
        footers              file -> the metadata of its file of each kind

        order                i64[P]     chunks, episode by episode, by time
        first, count         i64[E]     an episode's chunks are `order[first : first + count]`
        last                 i64[E]     an episode's last chunk
        num_steps            i64[E]
        t_started            i64[E]     steps of the episode before the first
        terminated           bool[E]
        truncated            bool[E]    by the environment, or by its loss
        ids                  object[E] text
        runs                 i64[E]     number of the run in `dataset.json`
        lost                 episode -> why its environment was lost
        more                 name -> Arrow array of P items
        pieces               i64[P]    what `piece_of` gave

    Raises DatasetError if there is no dataset, and, with its name, for a file that is damaged or missing.
    """

    def __init__(
        self,
        folder: DatasetFolder,
        kind: str = EPISODES,
        more: Sequence[str] = (),
        piece_of: Callable[[Any], Ints] | None = None,
    ) -> None:
        pa, _ = import_pyarrow()
        self._folder, self.description = folder, folder.read()
        if kind == EPISODES:
            self.columns: Mapping[Any, Any] = self.description["columns"]
            self.observation_space: Any = folder.space(self.description, "observation_space")
            self.action_space: Any = folder.space(self.description, "action_space")
        self.version = folder.check_pairs()
        self.groups: list[tuple[int, int]] = []
        self.footers: dict[int, dict[str, Any]] = {}
        tables, sizes = [], []
        for number in self.version:
            table, in_groups, footers = read_chunks(folder, number, kind, more)
            self.footers[number] = footers
            tables.append(table)
            self.groups += [(number, each) for each in range(len(in_groups))]
            sizes += in_groups
        if not tables:
            raise no_steps(folder.path)
        table = pa.concat_tables(tables)
        columns = {name: table.column(name).combine_chunks() for name in _COLUMNS}
        run, t_started, steps = (_numbers(columns[name]) for name in ("run", "t_started", "num_steps"))
        self.group: Ints = np.repeat(np.arange(len(sizes)), sizes)
        firsts: Ints = np.cumsum(np.array(sizes, np.int64)) - np.array(sizes, np.int64)  # first chunk of each row group
        self.place: Ints = np.arange(len(steps)) - firsts[self.group]
        before = np.cumsum(steps) - steps
        self.row, self.chunk_steps = before - before[firsts][self.group], steps
        ids = columns[Columns.EPS_ID].dictionary_encode()
        key = _numbers(ids.indices) * (int(run.max()) + 1) + run  # one number for each run and id
        self.more = {name: table.column(name).combine_chunks() for name in more}
        if piece_of is not None:
            self.pieces = piece_of(table)
            key = key * (int(self.pieces.max()) + 1) + self.pieces
        ends = (_numbers(columns[each]).astype(np.bool_) for each in ("terminated", "truncated"))
        self._group_by_episode(key, t_started, *ends)
        head = self.order[self.first]
        self.ids, self.runs = columns[Columns.EPS_ID].to_numpy(zero_copy_only=False)[head], run[head]
        lost, is_lost = columns["lost"], columns["lost"].is_valid().to_numpy(zero_copy_only=False)
        lost_episodes = np.flatnonzero(is_lost[self.last])
        self.lost: dict[int, str] = {each: str(lost[int(self.last[each])]) for each in lost_episodes.tolist()}

    def chunks_of(self, episodes: Ints) -> Ints:
        """The chunks of some episodes, i64[K], episode by episode."""
        chunks: Ints = self.order[ranges(self.first[episodes], self.count[episodes])]
        return chunks

    def _group_by_episode(self, key: Ints, t_started: Ints, terminated: Any, truncated: Any) -> None:
        order = np.argsort(key, kind="stable")
        stop = t_started + self.chunk_steps
        one, next_one = order[:-1], order[1:]
        begins = np.ones(len(order), np.bool_)
        begins[1:] = (key[one] != key[next_one]) | (stop[one] != t_started[next_one])
        begins[1:] |= terminated[one] | truncated[one]
        first = np.flatnonzero(begins)
        count = np.diff(first, append=len(order))
        by_place = np.argsort(order[first])
        first, count = first[by_place], count[by_place]
        self.order = order[ranges(first, count)]
        self.count, self.first = count, np.cumsum(count) - count
        self.last = self.order[self.first + count - 1]
        head = self.order[self.first]
        self.t_started, self.num_steps = t_started[head], stop[self.last] - t_started[head]
        self.terminated, self.truncated = terminated[self.last], truncated[self.last]

    def read(self, episodes: Ints, names: Collection[str], *, with_last: bool) -> StoredSteps:
        """Read the steps of episodes: see `EpisodeStore`; a module's have the column `env_t` as well."""
        described = {**self.columns, ENV_T: {"dtype": "int64", "shape": []}}
        asked = {name: described[name] for name in names}
        steps = self._rows(STEPS, asked, self.chunks_of(episodes), self.row, self.chunk_steps)
        if with_last:
            steps.last_obs = self._of_chunks(LAST_OBS, Columns.OBS, self.last[episodes])
            if Columns.STATE_OUT in self.columns:
                steps.initial = self._of_chunks(Columns.STATE_IN, Columns.STATE_OUT, self.order[self.first[episodes]])
        return steps

    def _of_chunks(self, name: str, like: str, chunks: Ints) -> Tree:
        """What is stored beside the steps of some chunks, i64[K], of a column's kind: a tree of arrays any[K, ...]."""
        rows = self._rows(EPISODES, {name: self.columns[like]}, chunks, self.place, np.ones_like(self.place))
        rows.join()
        return rows.taken(name)

    def _rows(
        self, kind: str, described: Mapping[str, Description], chunks: Ints, first: Ints, count: Ints
    ) -> StoredSteps:
        """The rows of some chunks, i64[K], in the files of a kind.

        first, count    i64[P]    first row of each chunk in its row group, and how many
        """
        lengths = count[chunks]
        order = np.argsort(chunks)  # as they lie in the files
        begins, size = np.empty_like(lengths), 0  # of each chunk, among all parts
        parts = {name: list[Tree]() for name in described}
        numbers, firsts = np.unique(self.group[chunks[order]], return_index=True)
        groups = [*zip(numbers.tolist(), np.split(order, firsts[1:]), strict=False)]  # none where there are no chunks
        reads = [partial(self._table, kind, list(described), *self.groups[group]) for group, _ in groups]
        with closing(in_pairs(reads)) as tables:
            for (_, mine), table in zip(groups, tables, strict=True):
                rows, counts = first[chunks[mine]], lengths[mine]
                trees = [tree_of(table.column(name), each) for name, each in described.items()]
                total, wanted = table.num_rows, ranges(rows, counts)
                if 2 * len(wanted) < total:  # the rest is let go
                    trees = [map_tree(lambda leaf, w=wanted: leaf.take(w, axis=0), tree) for tree in trees]
                    total, rows = len(wanted), np.cumsum(counts) - counts
                begins[mine] = size + rows
                size += total
                for name, tree in zip(described, trees, strict=True):
                    parts[name].append(tree)
        found = {name: trees or [empty_tree(described[name], 0)] for name, trees in parts.items()}
        return StoredSteps(found, ranges(begins, lengths), None)

    def _table(self, kind: str, names: Sequence[str], number: int, group: int) -> Any:
        """The table of a row group. In any thread."""
        with opened(self._folder, kind, number, self.footers[number][kind]) as file:
            return file.read_row_group(group, columns=names, use_threads=False)


@contextmanager
def opened(folder: DatasetFolder, kind: str, number: int, footer: Any = None) -> Iterator[Any]:
    """A committed file, for reading. Raises DatasetError, with its name, if it is missing, or not as it was written.

    footer    its `metadata`, if it was read before
    """
    _, pq = import_pyarrow()
    path = folder.file(kind, number)
    try:
        with pq.ParquetFile(path, metadata=footer, page_checksum_verification=True) as file:
            yield file
    except DatasetError:
        raise
    except FileNotFoundError:
        raise DatasetError(f"{path} is missing, expected a file for each in {STEPS} and {EPISODES}") from None
    except UNREADABLE as error:
        raise damaged(path, error) from None


def damaged(path: Any, error: object) -> DatasetError:
    """The error for a file that can't be read as the sink has written it."""
    reason = " ".join(str(error).split())  # some of pyarrow's have several lines
    text = f"{path} can't be read: {reason}; it was truncated or altered, or is of another kind"
    return DatasetError(text)


def read_chunks(
    folder: DatasetFolder, number: int, kind: str = EPISODES, more: Sequence[str] = ()
) -> tuple[Any, list[int], dict[str, Any]]:
    """The table of a file's chunks, how many there are in each of its row groups, and footers by kind.

    Raises DatasetError if the file of steps has others than a file of `EPISODES` says.
    """
    with opened(folder, kind, number) as file:
        sizes = [file.metadata.row_group(each).num_rows for each in range(file.num_row_groups)]
        table = file.read(columns=[*_COLUMNS, *more], use_threads=False)
        lengths = numbers_in(table, "num_steps")
        if kind == ENV_EPISODES:
            return table, sizes, {}
        footer = file.metadata
    with opened(folder, STEPS, number) as steps:
        rows = [steps.metadata.row_group(each).num_rows for each in range(steps.num_row_groups)]
        ends = np.cumsum(sizes)
        wanted = [int(lengths[end - size : end].sum()) for end, size in zip(ends, sizes, strict=True)]
        if wanted != rows or not sizes:
            reason = f"its row groups have {rows} steps, {number:06d}.parquet says {wanted}"
            raise damaged(folder.file(STEPS, number), reason)
        if _mark_of(steps.metadata) != _mark_of(footer):
            raise damaged(folder.file(STEPS, number), f"it was not written together with {folder.file(kind, number)}")
    return table, sizes, {EPISODES: footer, STEPS: steps.metadata}


def _mark_of(footer: Any) -> Any:
    """What files that were written together have alike."""
    return (footer.metadata or {}).get(MARK.encode())


def numbers_in(table: Any, name: str) -> Ints:
    """A column of whole numbers, i64[n]."""
    return _numbers(table.column(name).combine_chunks())


def _numbers(array: Any) -> Ints:
    numbers: Ints = array.to_numpy(zero_copy_only=False).astype(np.int64)
    return numbers


_STOPPED, _AGENT_STEPS, _RETURN = "env_t_stopped", "agent_steps", "return"


class ModuleEpisodes(ParquetEpisodes):
    """The A episodes of agents that one module has acted in.

    agents     ids of the agents that it has served
    agent      i64[A]    place in `agents`
    piece      i64[A]    number of the environment's episode
    last_t     i64[A]    steps of the environment's episode before the agent's last observation

    Raises DatasetError if one is of no environment's episode.
    """

    def __init__(self, module_id: Any, folder: DatasetFolder, envs: "EnvEpisodes") -> None:
        more = [Columns.AGENT_ID, _RETURN, _STOPPED, ENV_EPS_ID]
        super().__init__(folder, more=more, piece_of=lambda table: envs.pieces_of(folder, table))
        self.module_id = module_id
        head = self.order[self.first]
        texts = self.more[Columns.AGENT_ID].cast("string").dictionary_encode()
        by_text = {text: place for place, text in enumerate(stored_ids("agent", envs.agents))}
        found = [by_text.get(text, -1) for text in texts.dictionary.to_pylist()]
        if -1 in found:
            unknown = texts.dictionary[found.index(-1)]
            raise damaged(folder.path, f"it has the agent {unknown}, expected one of {envs.agents}")
        numbers, agent = np.unique(np.array(found, np.int64)[texts.indices.to_numpy()], return_inverse=True)
        self.agents = tuple(envs.agents[each] for each in numbers.tolist())
        self.agent: Ints = agent[head]
        self.piece: Ints = self.pieces[head]
        self.last_t: Ints = self.more[_STOPPED].to_numpy()[self.last]


class EnvEpisodes(ParquetEpisodes):
    """E episodes of environments, a row of numbers each, and the agents' episodes in them.

    agents                               all ids
    modules                              `ModuleEpisodes` of those that have acted
    columns                              module id -> name -> description
    observation_space, action_space      module id -> space

    The others are those of an `EpisodeStore`, in env steps. Raises DatasetError if there is no dataset, or one that
    is damaged.
    """

    def __init__(self, folder: DatasetFolder) -> None:
        # A sink describes runs and modules before it commits their files: those that are listed first are described.
        folder = DatasetFolder(folder.path, folder.numbers())
        super().__init__(folder, ENV_EPISODES, [_AGENT_STEPS])
        self.agents: list[Any] = self.description["agents"]
        keys = list(zip(self.runs.tolist(), self.ids.tolist(), strict=True))  # pieces of one episode have the same
        self._places = {key: place for place, key in enumerate(keys)}
        self._first_of: Ints = np.array([self._places[key] for key in keys], np.int64)  # a number for each run and id
        folders = [(each, folder.module(name, self.version)) for name, each in self.description["modules"].items()]
        self.modules = [ModuleEpisodes(module_id, each, self) for module_id, each in folders if each.numbers()]
        self.columns = {each.module_id: each.columns for each in self.modules}
        self.observation_space = {each.module_id: each.observation_space for each in self.modules}
        self.action_space = {each.module_id: each.action_space for each in self.modules}
        found = sum(int(each.chunk_steps.sum()) for each in self.modules)
        if (wanted := int(self.more[_AGENT_STEPS].to_numpy().sum())) != found:
            raise damaged(folder.path, f"its modules have {found} steps of agents, {ENV_EPISODES} says {wanted}")

    @property
    def step_nbytes(self) -> int:
        """Bytes of an env step in memory, with the steps of all agents in it, on average."""
        steps = [(int(each.num_steps.sum()), step_bytes(each.columns)) for each in self.modules]
        return 1 + sum(count * size for count, size in steps) // max(1, int(self.num_steps.sum()))

    def summary(self) -> EpisodeSummary:
        """Returns of all agents together, lengths in env steps, and the policy versions of all modules."""
        count = len(self.num_steps)
        returns, oldest, newest = np.zeros(count), np.full(count, np.iinfo(np.int64).max), np.zeros(count, np.int64)
        for each in self.modules:
            np.add.at(returns, each.pieces, each.more[_RETURN].to_numpy())
            if Columns.POLICY_VERSION not in each.columns:
                continue
            for episodes in windows_of(each.num_steps, np.arange(len(each.piece)), STEPS_AT_ONCE):
                versions = each.read(episodes, [Columns.POLICY_VERSION], with_last=False).taken(Columns.POLICY_VERSION)
                pieces = np.repeat(each.piece[episodes], each.num_steps[episodes])
                np.minimum.at(oldest, pieces, versions)
                np.maximum.at(newest, pieces, versions)
        is_whole = (self.t_started == 0) & (self.terminated | self.truncated)
        return EpisodeSummary(returns, self.num_steps, self.runs, is_whole, np.minimum(oldest, newest), newest)

    def pieces_of(self, folder: DatasetFolder, table: Any) -> Ints:
        """The number of the environment's episode of each of a module's chunks, i64[P].

        If fragments are missing, an episode is there in pieces: a chunk is of the piece in which its last step ends.
        """
        stops, first_of = self.t_started + self.num_steps, self._first_of
        most = 1 + int(stops.max(initial=0))
        order = np.lexsort((stops, first_of))
        ends = first_of[order] * most + stops[order]
        texts = table.column(ENV_EPS_ID).combine_chunks().cast("string").to_pylist()
        keys = zip(numbers_in(table, "run").tolist(), texts, strict=True)
        mine = np.array([self._places.get(key, -1) for key in keys], np.int64)
        stopped = numbers_in(table, _STOPPED)
        at = np.searchsorted(ends, mine * most + np.minimum(stopped, most - 1))
        pieces: Ints = order[np.minimum(at, len(order) - 1)]
        wrong = (
            (mine < 0) | (first_of[pieces] != mine) | (stopped > stops[pieces]) | (stopped <= self.t_started[pieces])
        )
        if wrong.any():
            row = int(np.argmax(wrong))
            raise damaged(folder.path, f"its chunk {row} ends in no chunk of {ENV_EPISODES}")
        return pieces
