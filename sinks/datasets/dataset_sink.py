"""DatasetSink: writes fragments to Parquet files, in a thread, so that a kill leaves only whole files."""

import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from rollflow.nodes.connectors.checked import checked_count
from rollflow.nodes.policies.space_text import described
from rollflow.nodes.rollout.rollout import Rollout
from rollflow.sinks.datasets.arrow_columns import arrow_of, describe_tree, dictionary_paths, import_pyarrow
from rollflow.sinks.datasets.dataset_folder import EPISODES, STEPS, DatasetFolder, FilePair
from rollflow.sinks.datasets.run_record import checked_rollout, run_record, version_of
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import DatasetError, PolicyError
from rollflow.stream.data.tree import map_tree
from rollflow.stream.fragments.fragment import RECORDED, Fragment

RESERVED = ("run", Columns.EPS_ID, Columns.T)
LAST_OBS = "last_obs"


logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _StepCounts:
    """Numbers of steps: handed to a sink, in committed files, and not written since writing has failed."""

    handed_over: int = 0
    committed: int = 0
    unwritten: int = 0


class DatasetSink:
    """Writes fragments of one agent to the dataset in a folder: an object that one calls, and a node of a graph.

        path             folder; a dataset that is there already is added to
        max_file_bytes   a file that has so many bytes is ended, and committed
        max_file_s       seconds after which a file is ended, at the next fragment
        queue_size       fragments that may wait for the thread that writes; a call waits while there are so many
        extra            names of the module's outputs to be written; None: all
        rollout          whose seed, environment's id, module and connector pieces `dataset.json` names; in a graph
                         it is found
        metadata         further values of JSON's types for `dataset.json`

    A file that is committed stays whole, whatever happens then. What is not committed is lost with the process. Use the
    sink in a `with` block, or `close` it: this commits what is written. In a graph, that happens at the run's end. A
    sink that is never closed logs how many steps are lost.

    Raises ValueError for arguments out of bounds; DatasetError without pyarrow, and for metadata that JSON can't hold.
    A call raises DatasetError for a fragment of another kind, where another sink writes to the folder, and if writing
    has failed.
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
        rollout: Rollout | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        import_pyarrow()
        self._max_bytes = checked_count("max_file_bytes", max_file_bytes, 1)
        if not max_file_s >= 0:
            raise ValueError(f"max_file_s is {max_file_s!r}, expected seconds from 0 on")
        self._max_s = max_file_s
        self._queue_size = checked_count("queue_size", queue_size, 1)
        self._extra = None if extra is None else tuple(extra)
        self._rollout, self._metadata = checked_rollout(rollout), dict(metadata or {})
        try:
            json.dumps(self._metadata, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise DatasetError(f"metadata {self._metadata!r} has no form in JSON: {error}") from None
        self._folder = DatasetFolder(path)
        self._kind: dict[str, Any] | None = None
        self._spaces: tuple[tuple[Any, Any], dict[str, Any]] | None = None  # of the last fragment, and their texts
        self._dictionary: list[str] = []  # paths of the columns that are written with one
        self._run: int | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._room = threading.BoundedSemaphore(self._queue_size)
        self._pending: list[Any] = []
        self._pair: FilePair | None = None
        self._opened_at = 0.0
        self._next_number = 0
        self._failure: Exception | None = None
        self._steps = _StepCounts()
        self._warning: Any = None  # finalizer, while the sink is open
        self._is_reported = False

    @property
    def num_steps(self) -> int:
        """Number of this sink's steps that stand in committed files."""
        return self._steps.committed

    def __call__(self, fragment: Fragment) -> None:
        """Hand a fragment to the thread that writes; waits while `queue_size` others do."""
        if not isinstance(fragment, Fragment):
            raise DatasetError(f"a dataset takes fragments of one agent, got {type(fragment).__name__}").see("dataset")
        self._raise_failure()
        if not fragment.num_steps:
            return
        kind = self._kind_of(fragment)
        if self._kind is not None:
            self._folder.check_kind(self._kind, kind)
        if self._executor is None:
            self._begin(kind)
        assert self._executor is not None
        self._room.acquire()
        self._steps.handed_over += fragment.num_steps
        self._pending = [each for each in self._pending if not each.done()]
        self._pending.append(self._executor.submit(self._write, fragment))

    def take_sources(self, sources: Sequence[Any], *, drops: bool, is_all: bool) -> Sequence[Any]:
        """Find the rollout among the nodes that lead to the sink, unless it was an argument; no node changes."""
        rollouts = [source for source in sources if isinstance(source, Rollout)]
        if self._rollout is None and len(rollouts) == 1:
            self._rollout = rollouts[0]
        return ()

    def flush(self) -> None:
        """Commit all that was handed over: end the file, and wait until it is on the disk.

        Raises DatasetError if writing has failed.
        """
        if self._executor is not None:
            self._pending.append(self._executor.submit(self._commit))
        self._raise_failure(is_last=True)

    def finish(self) -> Iterator[None]:
        """Commit at the end of a graph's stream; gives no items."""
        self.flush()
        return iter(())

    def close(self) -> None:
        """Commit all that was handed over, end the thread, and let other sinks write.

        Raises DatasetError if writing has failed, unless a call has raised it already. A later call opens the dataset
        again.
        """
        executor = self._executor
        if executor is None:
            return
        self._pending.append(executor.submit(self._commit))
        executor.shutdown()
        self._executor = None
        self._warning.detach()
        self._folder.unlock()
        if not self._is_reported:
            self._raise_failure(is_last=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<DatasetSink {os.fspath(self._folder.path)!r}: {self._steps.committed} steps committed>"

    # Inside: in the caller's thread

    def _kind_of(self, fragment: Fragment) -> dict[str, Any]:
        """Kind of a fragment, in JSON's types: spaces and columns, which are the same throughout a dataset."""
        columns = {name: fragment.columns[name].tree for name in self._names(fragment)}
        kinds = {name: describe_tree(map_tree(lambda leaf: leaf[0], tree), name) for name, tree in columns.items()}
        spaces = fragment.observation_space, fragment.layout.action_space
        if self._spaces is None or any(one is not other for one, other in zip(spaces, self._spaces[0], strict=True)):
            try:
                texts = [None if space is None else described(space) for space in spaces]
            except PolicyError as error:
                raise DatasetError(str(error)) from None
            self._spaces = spaces, dict(zip(("observation_space", "action_space"), texts, strict=True))
        return {**self._spaces[1], "columns": kinds}

    def _names(self, fragment: Fragment) -> list[str]:
        extra = fragment.extra_columns if self._extra is None else [*self._extra, Columns.POLICY_VERSION]
        names = [Columns.OBS, *RECORDED, *extra]
        if missing := [name for name in names if name not in fragment.columns]:
            raise DatasetError(
                f"the fragment has no output {missing[0]!r}, which is to be written; its outputs: "
                f"{', '.join(fragment.extra_columns)}"
            )
        if taken := [name for name in names if name in RESERVED]:
            raise DatasetError(f"a module's output is called {taken[0]!r}, expected none of {', '.join(RESERVED)}")
        return names

    def _begin(self, kind: dict[str, Any]) -> None:
        """Lock the folder, remove what a killed sink has left, note the run, and start the thread."""
        folder = self._folder
        try:
            folder.lock()
            self._next_number = max(folder.remove_left(), default=0) + 1
            if self._kind is None:
                record = run_record(self._metadata, self._rollout)
                self._run = folder.add_run(kind, version_of("rollflow"), record)
                self._kind = kind
                of_columns = kind["columns"].items()
                self._dictionary = [path for name, each in of_columns for path in dictionary_paths(name, each)]
        except OSError as error:
            folder.unlock()
            raise DatasetError(f"no dataset can be written to {folder.path}: {error}").see("dataset") from error
        except BaseException:
            folder.unlock()
            raise
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="rollflow-dataset")
        self._warning = weakref.finalize(self, _warn_unclosed, folder.path, self._steps)

    def _raise_failure(self, *, is_last: bool = False) -> None:
        """Raise DatasetError if writing has failed, once all that waits is counted; `is_last` waits in any case."""
        if is_last or self._failure is not None:
            wait(self._pending)
        if self._failure is None:
            return
        self._is_reported = True
        raise DatasetError(
            f"writing to {self._folder.path} has failed: {self._failure}; {self._steps.unwritten} steps that were "
            f"handed over are not in the dataset, {self._steps.committed} are"
        ).see("dataset") from self._failure

    # Inside: in the thread that writes

    def _write(self, fragment: Fragment) -> None:
        try:
            if self._failure is not None:
                self._steps.unwritten += fragment.num_steps
                return
            try:
                self._write_fragment(fragment)
            except Exception as error:
                self._fail(error, fragment.num_steps)
                return
        finally:
            self._room.release()
        assert self._pair is not None
        if self._pair.nbytes >= self._max_bytes or time.monotonic() - self._opened_at >= self._max_s:
            self._commit()

    def _write_fragment(self, fragment: Fragment) -> None:
        assert self._kind is not None
        assert self._run is not None
        if self._pair is None:
            self._pair, self._opened_at = FilePair(self._folder, self._next_number), time.monotonic()
            self._next_number += 1
        steps, episodes = tables_of(fragment, self._kind["columns"], self._run)
        # Steps come last: only they are counted, and both are there then.
        self._pair.write(EPISODES, episodes, ["run", Columns.EPS_ID, "lane", "slot", "lost"])
        self._pair.write(STEPS, steps, ["run", Columns.EPS_ID, *self._dictionary])

    def _commit(self) -> None:
        pair = self._pair
        if pair is None or self._failure is not None:
            return
        try:
            pair.commit()
        except Exception as error:
            self._fail(error, 0)
            return
        self._steps.committed += pair.num_steps
        self._pair = None

    def _fail(self, error: Exception, num_steps: int) -> None:
        """Give up: nothing is written from now on. `num_steps` are those of the fragment at hand."""
        pair, self._pair = self._pair, None
        self._steps.unwritten += num_steps
        if pair is not None:
            self._steps.unwritten += pair.num_steps
            pair.discard()
        self._failure = error


def _warn_unclosed(path: Path, steps: _StepCounts) -> None:
    """Log the steps that a sink loses which is gone, or whose process ends, before it was closed."""
    lost = steps.handed_over - steps.committed - steps.unwritten
    if lost:
        logger.warning(
            "a DatasetSink to %s was not closed: %d steps that were handed over are not in the dataset; expected a "
            "with block, or close()",
            path,
            lost,
        )


def tables_of(fragment: Fragment, columns: Mapping[str, Any], run: int) -> tuple[Any, Any]:
    """Arrow tables of a fragment's steps, a row each in chunk order, and of its chunks, a row each.

    columns    name -> description of what is written
    run        number of the run, which stands in every row
    """
    pa, _ = import_pyarrow()
    chunks = fragment.chunks
    lengths = chunks.stop - chunks.start
    count, total = len(lengths), int(lengths.sum())
    keys = list(zip(chunks.slot.tolist(), chunks.number.tolist(), strict=True))
    ids = pa.array([fragment.layout.episode_id(*key) for key in keys])
    firsts = np.cumsum(lengths) - lengths
    trees = {name: fragment.gather(name) for name in columns}
    of_step = np.repeat(np.arange(count, dtype=np.int32), lengths)
    step = {
        "run": pa.array(np.full(total, run, np.int32)),
        Columns.EPS_ID: pa.DictionaryArray.from_arrays(pa.array(of_step), ids),
        Columns.T: pa.array(np.arange(total) - np.repeat(firsts - chunks.t_started, lengths)),
    } | {name: arrow_of(trees[name], description) for name, description in columns.items()}
    lost = {key: values["lost"] for key, values in fragment.custom_data.items() if "lost" in values}
    episode = {
        "run": pa.array(np.full(count, run, np.int32)),
        Columns.EPS_ID: ids,
        "lane": pa.array(np.full(count, fragment.lane)),
        "slot": pa.array(np.asarray(fragment.env_slots(chunks.slot, chunks.number), np.int64)),
        "t_started": pa.array(chunks.t_started),
        "num_steps": pa.array(lengths),
        "return": pa.array(np.add.reduceat(trees[Columns.REWARDS].astype(np.float64), firsts)),
        "terminated": pa.array(chunks.terminated),
        "truncated": pa.array(chunks.truncated),
        "lost": pa.array([lost.get(key) for key in keys], pa.string()) if lost else pa.nulls(count, pa.string()),
        LAST_OBS: arrow_of(fragment.last_observations(), columns[Columns.OBS]),
    }
    return pa.table(step), pa.table(episode)
