"""DatasetSink: writes fragments to Parquet files, in a thread, so that a kill leaves only whole files."""

import json
import logging
import os
import platform
import secrets
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from importlib import metadata as packages
from itertools import chain
from math import inf
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollflow.nodes.argument_checks import check_names, checked_count, checked_number
from rollflow.nodes.connectors.pipelines.connector_pipeline_v2 import ConnectorPipelineV2
from rollflow.nodes.policies.artifact_files import folder_of
from rollflow.nodes.policies.space_text import described
from rollflow.nodes.rollout.multi_agent_rollout import MultiAgentRollout
from rollflow.nodes.rollout.rollout import Rollout
from rollflow.sinks.datasets.arrow_columns import (
    array_of,
    arrow_of,
    describe_tree,
    empty_tree,
    import_pyarrow,
    table_of,
)
from rollflow.sinks.datasets.dataset_folder import (
    DESCRIPTION,
    ENV_EPISODES,
    ENV_EPS_ID,
    ENV_T,
    EPISODES,
    LAST_OBS,
    MARK,
    MODULES,
    STEPS,
    DatasetFolder,
    checked_id,
    make_folder,
    stored_ids,
)
from rollflow.sinks.datasets.episode_block import StoredAgents, StoredFragment
from rollflow.stream.data.closing import ClosedOnExit, closing_on_error
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ColumnError, DatasetError, PolicyError, shown
from rollflow.stream.data.stored_files import sync
from rollflow.stream.data.tree import Tree, concatenate_trees, kind_of, leaves_of, map_tree
from rollflow.stream.fragments.fragment import Fragment
from rollflow.stream.multi_agent.agent_fragment import ModuleFragment
from rollflow.stream.multi_agent.multi_agent_fragment import AnyFragment, MultiAgentFragment

_LEAST_BYTES = 4096  # of a fragment of one step, about
_ENV_CHUNK = np.dtype(
    {"names": ["env", "slot", "start", "begin", "end", "terminated", "truncated"], "formats": 5 * ["i8"] + 2 * ["?"]}
)


class StoredRows(NamedTuple):
    """What is stored of a fragment's C chunks, and of their n steps in chunk order, copied from it.

    chunks    column -> array any[C], text of each chunk, or tree of arrays any[C, ...]
    steps     column -> array any[n], or tree of arrays any[n, ...]; None: of environments' episodes
    like      column -> description of those that are trees
    nbytes    of these, with what a fragment takes beside its arrays
    """

    chunks: Mapping[str, Any]
    steps: Mapping[str, Any] | None
    like: Mapping[str, Any]
    nbytes: int


def rows_of(
    fragment: Fragment,
    columns: Mapping[str, Any],
    runs: NDArray[np.int32],
    of_chunks: Mapping[str, Any] | None = None,
    of_steps: Mapping[str, Any] | None = None,
) -> StoredRows:
    """What is stored of a fragment of one agent, or of a module's agents.

    columns                name -> description of what is stored of each step
    runs                   i32[C]    number of each chunk's run, or i32[1]: of all
    of_chunks, of_steps    further columns

    A chunk that another dataset has cut is stored without the end that it has not reached. Raises DatasetError for a
    stateful module's episode whose initial state is not recorded.
    """
    chunks, slot_lists = fragment.chunks, (fragment.chunks.slot.tolist(), fragment.chunks.number.tolist())
    lengths, truncated = chunks.stop - chunks.start, chunks.truncated
    count, lasts = len(lengths), np.cumsum(lengths) - 1
    trees = {name: fragment.gather(name) for name in columns}
    last_obs, like = fragment.last_observations(), {**columns, LAST_OBS: columns[Columns.OBS]}
    states: dict[str, Tree] = {}
    if Columns.STATE_OUT in columns:
        one = map_tree(lambda leaf: leaf[0], empty_tree(columns[Columns.STATE_OUT], 1))
        states[Columns.STATE_IN], known = fragment.initial_states(one)
        like[Columns.STATE_IN] = columns[Columns.STATE_OUT]
        if (~known & (chunks.t_started == 0)).any():
            raise DatasetError(
                f"{fragment.describe()}: the state before an episode's first step is not recorded, expected "
                "episodes with their initial_state"
            )
    lost: list[str | None] = [None] * count
    if fragment.custom_data:
        custom = [fragment.custom_data.get(key, {}) for key in zip(*slot_lists, strict=True)]
        truncated = truncated & np.array(["cut" not in each for each in custom])
        trees[Columns.TRUNCATEDS][lasts] = truncated
        lost = [each.get("lost") for each in custom]
    leaves = [leaf for tree in (*trees.values(), last_obs) for leaf in leaves_of(tree)]
    return StoredRows(
        {
            "run": np.broadcast_to(runs, count),
            Columns.EPS_ID: map(fragment.layout.episode_id, *slot_lists),  # made in the thread that writes
            **(of_chunks or {}),
            "lane": np.full(count, fragment.lane),
            "slot": np.asarray(fragment.env_slots(chunks.slot, chunks.number), np.int64),
            "t_started": chunks.t_started,
            "num_steps": lengths,
            "return": np.add.reduceat(trees[Columns.REWARDS].astype(np.float64), lasts + 1 - lengths),
            "terminated": chunks.terminated,
            "truncated": truncated,
            "lost": lost,
            LAST_OBS: last_obs,
            **states,
        },
        {**(of_steps or {}), **trees},
        like,
        _LEAST_BYTES + sum(leaf.nbytes for leaf in leaves),
    )


def tables_of(rows: Sequence[StoredRows]) -> dict[str, Any]:
    """Arrow tables by their kinds: of the steps of some fragments, in chunk order, and of their chunks, a row each.

    Of chunks of environments' episodes, their table alone.
    """
    pa, _ = import_pyarrow()
    like = rows[0].like
    chunk = {name: _joined([each.chunks[name] for each in rows], like.get(name)) for name in rows[0].chunks}
    if rows[0].steps is None:
        return {ENV_EPISODES: table_of(chunk, optional=["lost"])}
    run, t_started, lengths = (chunk[name].to_numpy() for name in ("run", "t_started", "num_steps"))
    total, firsts = int(lengths.sum()), np.cumsum(lengths) - lengths
    of_step = np.repeat(np.arange(len(lengths)), lengths)
    texts = {name: chunk[name].dictionary_encode() for name in _REPEATED if name in chunk}
    chunk |= {name: each for name, each in texts.items() if name != Columns.EPS_ID}
    repeated = {
        name: pa.DictionaryArray.from_arrays(array_of(each.indices.to_numpy()[of_step]), each.dictionary)
        for name, each in texts.items()
    }
    step = {
        "run": array_of(run[of_step]),
        Columns.EPS_ID: repeated.pop(Columns.EPS_ID),
        Columns.T: array_of(np.arange(total) - np.repeat(firsts - t_started, lengths)),
        **repeated,
    }
    steps = [each.steps for each in rows if each.steps is not None]
    step |= {name: _joined([each[name] for each in steps], like.get(name)) for name in steps[0]}
    return {EPISODES: table_of(chunk, optional=["lost"]), STEPS: table_of(step)}


def _joined(parts: Sequence[Any], description: Any) -> Any:
    """Arrow array of a column's parts: trees of a description, arrays, or texts."""
    pa, _ = import_pyarrow()
    if description is not None:
        return arrow_of(concatenate_trees(parts), description)
    if isinstance(parts[0], np.ndarray):
        return array_of(np.concatenate(parts))
    return pa.array(chain.from_iterable(parts), pa.string())


def modules_of(fragment: MultiAgentFragment) -> dict[str, ModuleFragment]:
    """The steps of each module that has made some: name of its folder -> its fragment."""
    return {folder_of(checked_id("module", module_id)): part for module_id, part in fragment.by_module().items()}


def env_chunks_of(fragment: MultiAgentFragment) -> tuple[NDArray[Any], list[str], list[str | None]]:
    """The M chunks of environments' episodes, environment by environment, in the order of time.

    Gives records of them, their episodes' ids, and why an environment was lost, for each chunk that ended so:

        env, slot     environment in the fragment, and in the lane
        start         vector step at which the episode began
        begin, end    vector steps at which the chunk begins and ends
    """
    clock, last = fragment.clock, fragment.clock.first + fragment.num_rows
    records, ids, lost = [], list[str](), list[str | None]()
    for env in range(fragment.num_envs):
        for nth in range(clock.count(env)):
            start, ended = clock.start(env, nth), clock.end_of(env, nth)
            begin, end = max(clock.first, start), last if ended is None else ended[0]
            if begin < end:
                key = env, int(clock.numbers[env]) + nth
                data = fragment.custom_data.get(key, {})
                how = ended[1] if ended is not None and "cut" not in data else None  # whether it was truncated
                is_terminated = how is not None and not how
                records.append((env, fragment.env_slot(env), start, begin, end, is_terminated, bool(how)))
                ids.append(fragment.episode_id(*key))
                lost.append(None if ended is None else data.get("lost"))
    return np.array(records, _ENV_CHUNK), ids, lost


def agent_rows_of(
    fragment: MultiAgentFragment, columns: Mapping[str, Mapping[str, Any]], runs: NDArray[np.int32]
) -> dict[str, StoredRows]:
    """What is stored of each module's steps, by its folder, and behind these, by "", of the environments' episodes.

    columns    name of the module's folder -> name -> description of what is stored
    runs       i32[M]    number of the run of each chunk of an environment's episode, or i32[1] of all
    """
    envs, ids, lost = env_chunks_of(fragment)
    runs, agent_steps = np.broadcast_to(runs, len(ids)), np.zeros(len(ids), np.int64)
    rows: dict[str, StoredRows] = {}
    for name, part in modules_of(fragment).items():
        chunks, agents = part.chunks, part.part.agents
        lengths = chunks.stop - chunks.start
        stopped = part.clock[chunks.stop, chunks.slot]  # i64[C], vector step of the last observation
        ended = np.flatnonzero(chunks.terminated | chunks.truncated)
        keys = zip((chunks.stop[ended] - 1).tolist(), chunks.slot[ended].tolist(), strict=True)
        stopped[ended] = [part.ends.get(key, last) for key, last in zip(keys, stopped[ended].tolist(), strict=True)]
        # A chunk's last step is made within the env chunk: after its begin, and not after its end.
        most = 1 + int(max(envs["end"].max(initial=0), stopped.max(initial=0)))
        of = np.searchsorted(envs["env"] * most + envs["end"], chunks.slot // len(agents) * most + stopped)
        np.add.at(agent_steps, of, lengths)
        of_chunks = {
            Columns.AGENT_ID: [checked_id("agent", agents[slot % len(agents)]) for slot in chunks.slot.tolist()],
            Columns.MODULE_ID: [str(part.module_ids[int(part.chunk_modules[0])])] * len(lengths),
            ENV_EPS_ID: [ids[each] for each in of.tolist()],
            "env_t_stopped": stopped - envs["start"][of],
        }
        seen = part.in_chunk_order(part.clock[part.first_row : part.last_row])
        of_steps = {ENV_T: seen - np.repeat(envs["start"][of], lengths)}
        rows[f"{MODULES}/{name}/"] = rows_of(part, columns[name], runs[of], of_chunks, of_steps)
    of_envs = {
        "run": runs,
        Columns.EPS_ID: ids,
        "lane": np.full(len(ids), fragment.lane),
        "slot": envs["slot"],
        "t_started": envs["begin"] - envs["start"],
        "num_steps": envs["end"] - envs["begin"],
        "agent_steps": agent_steps,
        "terminated": envs["terminated"],
        "truncated": envs["truncated"],
        "lost": lost,
    }
    return rows | {"": StoredRows(of_envs, None, {}, envs.nbytes)}


# Columns of steps that are written with a dictionary: numbers take longer, for no less.
_REPEATED = [Columns.EPS_ID, Columns.AGENT_ID, Columns.MODULE_ID, ENV_EPS_ID]
_SOUGHT = ["run", Columns.EPS_ID, Columns.T]  # and those with least and largest values, by which readers seek rows
_GROUP_BYTES = 2 << 20  # before compression, that make a row group
_PACKAGES = ("gymnasium", "numpy", "pyarrow", "rollflow", "torch")
# Fragments up to this size are copied in the caller's thread: another one would wait longer for the interpreter.
_SMALL_BYTES = 1 << 20
logger = logging.getLogger(__name__)


class FileSet:
    """Files of one number, written together: of steps, of their episodes, and of what else a dataset has.

    folder      of the dataset, which is locked
    number      of the files

    num_steps   that were handed over to be written
    opened_at   time of `monotonic`

    Small fragments wait, and become one row group: to make a table and to write it takes a while, however small it is.
    """

    def __init__(self, folder: DatasetFolder, number: int) -> None:
        self._folder, self.number = folder, number
        self.num_steps, self.opened_at = 0, time.monotonic()
        self._files: dict[str, Any] = {}
        self._writers: dict[str, Any] = {}
        self._rows: dict[str, list[Any]] = {}
        self._waiting_bytes = self._written_bytes = 0
        self._mark = secrets.token_hex(8)  # of the set: steps are not read with episodes of another one

    @property
    def nbytes(self) -> int:
        """Bytes of all files, and of what waits for them."""
        return self._waiting_bytes + self._written_bytes

    def write(self, rows: Mapping[str, StoredRows], num_steps: int) -> None:
        """Write what is stored of a fragment of so many steps, or let it wait for others.

        rows    by the folder of their files, such as "" or "modules/red/"
        """
        self.num_steps += num_steps
        for folder, each in rows.items():
            self._rows.setdefault(folder, []).append(each)
            self._waiting_bytes += each.nbytes
        if self._waiting_bytes >= _GROUP_BYTES:
            self._write_waiting()

    def _write_waiting(self) -> None:
        """Write a row group of each kind of table that waits."""
        for folder, rows in self._rows.items():
            for kind, table in tables_of(rows).items():
                self._write_table(folder + kind, table)
        self._rows, self._waiting_bytes = {}, 0
        self._written_bytes = sum(file.tell() for file in self._files.values())

    def _write_table(self, kind: str, table: Any) -> None:
        """Write a row group."""
        pa, pq = import_pyarrow()
        has_steps, is_integer = Path(kind).name == STEPS, pa.types.is_integer
        if kind not in self._writers:
            make_folder(self._folder.path / kind, self._folder.path)
            # Arrow's own file: it waits for no interpreter lock, which a rollout holds nearly all the time.
            file = self._files[kind] = pa.OSFile(os.fspath(self._folder.partial(kind, self.number)), "wb")
            self._writers[kind] = pq.ParquetWriter(
                file,
                table.schema,
                compression="zstd",
                compression_level=1,
                use_dictionary=_REPEATED if has_steps else False,
                column_encoding={
                    # Where a name has dots, Parquet's writer takes it for the path of another column's part.
                    each.name: "DELTA_BINARY_PACKED"
                    for each in table.schema
                    if is_integer(each.type) and "." not in each.name
                },
                write_statistics=_SOUGHT if has_steps else True,
                write_page_checksum=True,
            )
            self._writers[kind].add_key_value_metadata({MARK: self._mark})
        self._writers[kind].write_table(table, row_group_size=max(1, table.num_rows))

    def commit(self) -> None:
        """End the files, write them to the disk, and name them; the one that commits the others comes last."""
        self._write_waiting()
        for kind, writer in self._writers.items():
            writer.close()
            self._files[kind].close()
            sync(self._folder.partial(kind, self.number))
        last = self._folder.last_kind
        for kind in sorted(self._writers, key=lambda kind: kind == last):
            self._folder.partial(kind, self.number).replace(self._folder.file(kind, self.number))
            sync(self._folder.path / kind)

    def discard(self) -> None:
        """Close the files and remove them, as far as the disk allows."""
        for kind, file in self._files.items():
            parts = self._writers.get(kind, file), file
            for remove in (*(part.close for part in parts), self._folder.partial(kind, self.number).unlink):
                with suppress(OSError, ValueError):  # a disk that has failed may fail again
                    remove()


AnyRollout = Rollout | MultiAgentRollout


@cache
def version_of(package: str) -> str:
    """The version of an installed package; "unknown" for one that is only on the path."""
    try:
        return packages.version(package)
    except packages.PackageNotFoundError:
        return "unknown"


def _described(rollout: AnyRollout) -> dict[str, Any]:
    """Id of the environment if it is known, its keywords, seed, and names of the classes of modules and pieces."""
    env = rollout.environments.envs[0]
    spec = getattr(env, "spec", None) or getattr(next(iter(getattr(env, "envs", ())), None), "spec", None)
    kwargs = rollout.env_kwargs if isinstance(rollout, Rollout) else {}
    return {
        "env": None if spec is None else spec.id,
        "seed": rollout.seed,
        **({"env_kwargs": {name: _plain(value) for name, value in kwargs.items()}} if kwargs else {}),
        **{name: _names_in(getattr(rollout, name)) for name in ("module", "env_to_module", "module_to_env")},
    }


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


def _names_in(part: Any) -> Any:
    """Name of a module's class, or those of modules by id, of a pipeline's pieces, or of several pipelines'."""
    if isinstance(part, Mapping):
        return {str(key): _name_of(each) for key, each in part.items()}
    if isinstance(part, ConnectorPipelineV2):
        return [_name_of(piece) for piece in part.connectors]
    return [_names_in(each) for each in part] if isinstance(part, list | tuple) else _name_of(part)


def _name_of(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


RESERVED = ("run", Columns.EPS_ID, Columns.T, Columns.AGENT_ID, Columns.MODULE_ID, ENV_EPS_ID, ENV_T)

_Rows = Mapping[str, StoredRows]  # as `FileSet.write` takes them


class DatasetSink(ClosedOnExit):
    """Writes fragments to the dataset in a folder: an object that one calls, and a node of a graph.

        path             folder, which is made; a dataset that is there already is added to
        max_file_bytes   a file that has so many bytes is ended, and committed
        max_file_s       seconds after which a file is ended, at the next fragment
        queue_size       fragments that may wait for the thread that writes; a call waits while there are so many
        extra            names of the module's outputs to be written; None: all
        rollout          whose seed, environment's id, module and connector pieces `dataset.json` names for the sink's
                         first run; in a graph it is found
        metadata         further values of JSON's types for `dataset.json`

    A file that is committed stays whole, whatever happens then. What is not committed is lost with the process. Use the
    sink in a `with` block, or `close` it: this commits what is written. In a graph, that happens at the run's end. A
    sink that is never closed logs how many steps are lost.

    Fragments of several agents are written by module. Those of one agent go to another dataset.

    Steps of each rollout are a run of their own, and so are those of each run that a `DatasetSource` has read.

    Raises ValueError for arguments out of bounds; DatasetError without pyarrow, for metadata that JSON can't hold,
    if another sink writes to the folder, and if nothing can be written there. A call raises DatasetError for a
    fragment of another kind, after `close`, and if writing has failed.
    """

    where: Literal["inline", "thread"] = "thread"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_file_bytes: int = 128 << 20,
        max_file_s: float = 300.0,
        queue_size: int = 2,
        extra: Sequence[str] | None = None,
        rollout: AnyRollout | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        import_pyarrow()
        self._max_bytes = checked_count("max_file_bytes", max_file_bytes, 1)
        self._max_s = checked_number("max_file_s", max_file_s, least=0, most=inf, noun="seconds")
        self._queue_size = checked_count("queue_size", queue_size, 1)
        check_names("extra", extra)
        self._extra = None if extra is None else tuple(extra)
        if not isinstance(metadata, Mapping | None):
            raise ValueError(f"metadata is {shown(metadata)}, expected a dict of values that JSON can hold")
        if not isinstance(rollout, AnyRollout | None):
            raise DatasetError(f"rollout is a {type(rollout).__name__}, expected a rollout, or None")
        self._rollout, self._metadata = rollout, dict(metadata or {})
        try:
            json.dumps(self._metadata, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise DatasetError(f"metadata {self._metadata!r} has no form in JSON: {error}") from None
        self._description: dict[str, Any] | None = None  # None: nothing is there yet
        self._kinds: dict[str, dict[str, Any]] = {}  # by the names of the modules' folders, "" for one agent
        self._agents: dict[str, Any] = {}  # text -> id, with those that were in the dataset before
        self._modules: dict[str, Any] = {}  # the same
        self._last: dict[str, tuple[tuple[Any, Any], dict[str, Any], dict[str, Any]]] = {}  # see `_kind_of`
        self._runs: dict[tuple[Any, int], int] = {}  # (what has made it, number there) -> number of a run here
        self._executor: ThreadPoolExecutor | None = None
        self._room = threading.BoundedSemaphore(self._queue_size)
        self._files: FileSet | None = None
        self._failure: Exception | None = None
        self._steps = Counter[str]()  # handed over, and in committed files
        self._is_reported = self._is_ending = False
        self._folder = DatasetFolder(path)
        self._next_number = self._opened()
        self._abandon: Any = weakref.finalize(self, _abandon, self._folder, self._steps)  # while the sink is open

    @property
    def num_steps(self) -> int:
        """Number of this sink's steps that stand in committed files."""
        return self._steps["committed"]

    def __call__(self, fragment: AnyFragment) -> None:
        """Hand a fragment to the thread that writes; waits while `queue_size` others do."""
        if not isinstance(fragment, Fragment | MultiAgentFragment):
            raise DatasetError(f"a dataset takes fragments, got {type(fragment).__name__}")
        self._raise_failure()
        if self._is_ending or not self._abandon.alive:
            raise DatasetError(f"the sink to {self._folder.path} is closed, expected a new one")
        if fragment.is_empty:
            return
        fragment = fragment.host
        make_rows = partial(self._rows_of, fragment, self._runs_of(fragment))
        rows = make_rows() if isinstance(fragment, Fragment) and fragment.nbytes <= _SMALL_BYTES else make_rows
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="rollflow-dataset")
        self._room.acquire()
        self._steps["handed over"] += fragment.num_steps
        self._executor.submit(self._work, partial(self._write, rows, fragment.num_steps)).add_done_callback(
            lambda _: self._room.release()
        )

    def take_sources(self, sources: Sequence[Any], *, drops: bool, is_all: bool) -> Sequence[Any]:
        """Find the rollout among the nodes that lead to the sink, unless it was an argument; no node changes."""
        rollouts = [source for source in sources if isinstance(source, AnyRollout)]
        if self._rollout is None and len(rollouts) == 1:
            self._rollout = rollouts[0]
        return ()

    def flush(self) -> None:
        """Commit all that was handed over: end the file, and wait until it is on the disk.

        Raises DatasetError if writing has failed.
        """
        if self._executor is not None:
            self._executor.submit(self._work, self._commit).result()
        self._raise_failure()

    def finish(self) -> Iterator[None]:
        """Commit at the end of a graph's stream; gives no items."""
        self.flush()
        return iter(())

    def close(self) -> None:
        """Commit all that was handed over, end the thread, and let other sinks write.

        Raises DatasetError if writing has failed, unless a call has raised it already.
        """
        if not self._abandon.alive:
            return
        if self._executor is not None:
            if not self._is_ending:
                self._is_ending = True
                self._executor.submit(self._work, self._commit)
            self._executor.shutdown()  # which Ctrl-C breaks off: the next call goes on waiting
            self._executor = None
        self._abandon.detach()
        self._folder.unlock()
        if not self._is_reported:
            self._raise_failure()

    def __repr__(self) -> str:
        return f"<DatasetSink {os.fspath(self._folder.path)!r}: {self.num_steps} steps committed>"

    # Inside: in the caller's thread

    def _kind_of(self, fragment: Fragment, name: str) -> dict[str, Any]:
        """Kind of a fragment, in JSON's types: spaces and columns, which are the same throughout a module's steps.

        Fragments with the last one's spaces and types of columns are of its kind. Raises DatasetError for another kind
        than before.
        """
        try:
            columns = fragment.stored_columns(self._extra, "which is to be written")
        except ColumnError as error:
            raise DatasetError(str(error)) from None
        if taken := [name for name in columns if name in RESERVED]:
            raise DatasetError(f"a module's output is called {taken[0]!r}, expected none of {', '.join(RESERVED)}")
        spaces = fragment.observation_space, fragment.layout.action_space
        types = {name: kind_of(tree) for name, tree in columns.items()}
        if (last := self._last.get(name)) is not None and last[0][0] is spaces[0] and last[0][1] is spaces[1]:
            if last[1] == types:
                return last[2]
        try:
            texts = [None if space is None else described(space) for space in spaces]
        except PolicyError as error:
            raise DatasetError(str(error)) from None
        kinds = {name: describe_tree(map_tree(lambda leaf: leaf[0], tree), name) for name, tree in columns.items()}
        kind = {"observation_space": texts[0], "action_space": texts[1], "columns": kinds}
        if name in self._kinds:
            folder = self._folder.module(name) if name else self._folder
            folder.check_kind(self._kinds[name], kind)
        self._last[name] = spaces, types, kind
        return kind

    def _opened(self) -> int:
        """Lock the folder, read what is there, and remove what a killed sink has left; the number of the next file."""
        folder = self._folder
        folder.lock()
        with closing_on_error(folder.unlock):
            if (folder.path / DESCRIPTION).exists():
                self._description = description = folder.read()
                modules = description.get("modules", {})
                self._agents = stored_ids("agent", description.get("agents", ()))
                self._modules = stored_ids("module", modules.values())
                parts = {name: folder.module(name) for name in modules} if folder.has_agents else {"": folder}
                self._kinds = {name: each.read() for name, each in parts.items() if (each.path / DESCRIPTION).exists()}
            elif theirs := folder.of_others():  # which a sink would take for its own
                raise theirs
            return max(folder.remove_left(), default=0) + 1

    def _runs_of(self, fragment: AnyFragment) -> NDArray[np.int32]:
        """i32[C]: the number of each chunk's run; what no run has yet gets one, with a record in the description.

        Of several agents the chunks are those of the environments. Of a rollout's fragment: i32[1], for all chunks.
        """
        kinds, agents, modules = self._described(fragment)
        maker: object
        if isinstance(fragment, StoredFragment | StoredAgents):
            maker, numbers = fragment.dataset, fragment.runs
        else:
            maker = None if fragment.origin is None else fragment.origin.ledger
            numbers = np.zeros(1, np.int64)
        found, places = np.unique(numbers, return_inverse=True)
        new = [each for each in found.tolist() if (maker, each) not in self._runs]
        if new or kinds.keys() - self._kinds.keys() or agents.keys() - self._agents.keys():
            kinds = self._kinds | kinds
            if isinstance(fragment, Fragment):
                own = kinds[""]
            else:
                ids = {name: id_ for text, id_ in modules.items() if (name := folder_of(text)) in kinds}
                own = {"agents": list(agents.values()), "modules": ids}
            before: dict[str, Any] = self._description or {"rollflow": version_of("rollflow"), "runs": []}
            runs = [*before["runs"], *(self._record_of(fragment, each) for each in new)]
            description = {**before, **own, "runs": runs}
            self._folder.describe(description, {name: each for name, each in kinds.items() if name})
            self._runs |= {(maker, each): number for number, each in enumerate(new, len(before["runs"]))}
            self._description, self._kinds, self._agents, self._modules = description, kinds, agents, modules
        return np.array([self._runs[maker, each] for each in found.tolist()], np.int32)[places]

    def _described(self, fragment: AnyFragment) -> tuple[dict[str, dict[str, Any]], dict[str, Any], dict[str, Any]]:
        """The kind of each module of a fragment, by the name of its folder, and all agents and modules, by their texts.

        Raises DatasetError for another kind than before, and if two ids have one text.
        """
        is_one = isinstance(fragment, Fragment)
        if self._description is not None and is_one != ("columns" in self._description):
            raise DatasetError(
                f"a fragment of {'one agent' if is_one else 'several agents'} does not fit the dataset at "
                f"{self._folder.path}, expected fragments of one kind"
            )
        if isinstance(fragment, Fragment):
            return {"": self._kind_of(fragment, "")}, self._agents, self._modules
        agents = [agent for part in fragment.parts for agent in part.part.agents]
        agents_by_text = stored_ids("agent", [*self._agents.values(), *agents])
        modules_by_text = stored_ids("module", [*self._modules.values(), *fragment.module_ids])
        kinds = {name: self._kind_of(part, name) for name, part in modules_of(fragment).items()}
        return kinds, agents_by_text, modules_by_text

    def _record_of(self, fragment: AnyFragment, number: int) -> dict[str, Any]:
        """The record of a run, in JSON's types: as the dataset had it that was read, or one of the sink's rollout."""
        if isinstance(fragment, StoredFragment | StoredAgents):
            record = fragment.dataset.description["runs"][number]
            return {**record, "metadata": {**record["metadata"], **self._metadata}}
        rollout = None if self._runs or self._rollout is None else _described(self._rollout)
        versions = {"python": platform.python_version(), **{name: version_of(name) for name in _PACKAGES}}
        return {"metadata": self._metadata, "rollout": rollout, "versions": versions}

    def _raise_failure(self) -> None:
        """Raise DatasetError if writing has failed."""
        if self._failure is not None:
            self._is_reported = True
            raise DatasetError(
                f"writing to {self._folder.path} has failed: {self._failure}; {_lost_of(self._steps)} steps that were "
                f"handed over are not in the dataset, {self.num_steps} are"
            ) from self._failure

    # Inside: in the thread that writes

    def _work(self, job: Callable[[], None]) -> None:
        """Do something with the files, unless it has failed before: then nothing is written any more."""
        if self._failure is not None:
            return
        try:
            job()
        except Exception as error:
            if self._files is not None:
                self._files.discard()
                self._files = None
            self._failure = error

    def _write(self, rows: _Rows | Callable[[], _Rows], num_steps: int) -> None:
        if self._files is None:
            self._files = FileSet(self._folder, self._next_number)
            self._next_number += 1
        self._files.write(rows() if callable(rows) else rows, num_steps)
        if self._files.nbytes >= self._max_bytes or time.monotonic() - self._files.opened_at >= self._max_s:
            self._commit()

    def _commit(self) -> None:
        if self._files is not None:
            self._files.commit()
            self._steps["committed"] += self._files.num_steps
            self._files = None

    def _rows_of(self, fragment: AnyFragment, runs: NDArray[np.int32]) -> _Rows:
        """What is stored of a fragment."""
        columns = {name: kind["columns"] for name, kind in self._kinds.items()}
        if isinstance(fragment, Fragment):
            return {"": rows_of(fragment, columns[""], runs)}
        return agent_rows_of(fragment, columns, runs)


def _lost_of(steps: Mapping[str, int]) -> int:
    """Number of steps that were handed over, and that no committed file has."""
    return steps["handed over"] - steps["committed"]


def _abandon(folder: DatasetFolder, steps: Mapping[str, int]) -> None:
    """Unlock the folder of a sink that is gone, or whose process ends, before it was closed; log what it loses."""
    folder.unlock()
    if lost := _lost_of(steps):
        logger.warning(
            "a DatasetSink to %s was not closed: %d steps that were handed over are not in the dataset; expected a "
            "with block, or close()",
            folder.path,
            lost,
        )
