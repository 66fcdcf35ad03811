"""LeRobot's datasets, format v3.0, written from the episodes of a dataset.

meta/info.json                                  features, counts, frames per second, and where the files are
meta/stats.json                                 least, largest, mean, deviation and count of each feature
meta/tasks.parquet                              task, in words -> its number
meta/episodes/chunk-000/file-000.parquet        a row for each episode: its length, its rows, its own statistics
data/chunk-000/file-000.parquet                 a row for each step, a row group for each episode; then file-001, …
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollflow.sinks.datasets.arrow_columns import import_pyarrow
from rollflow.sinks.datasets.dataset_folder import whole_folder
from rollflow.stream.data.errors import DatasetError
from rollflow.stream.data.tree import Tree
from rollflow.stream.episodes.single_agent import SingleAgentEpisode

_FILE = "chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
_DATA, _EPISODES = f"data/{_FILE}", f"meta/episodes/{_FILE}"
_FILES_OF_A_CHUNK = 1000
_FILE_MB = 100  # of steps, before they are compressed
_NUMBERS = ("timestamp", "frame_index", "episode_index", "index", "task_index")
_MOST_DIMENSIONS = 5


class FeatureStats:
    """Statistics of a feature over rows that come block by block: f64[*shape] each, by the shape of one item."""

    def __init__(self) -> None:
        self.count = 0
        self._min = self._max = self._mean = self._squares = np.zeros(0)

    def add(self, values: NDArray[Any]) -> None:
        """Take rows any[n, *shape]."""
        rows = values.astype(np.float64)
        count, mean = len(rows), rows.mean(0)
        squares = ((rows - mean) ** 2).sum(0)
        if not self.count:
            self.count, self._mean, self._squares = count, mean, squares
            self._min, self._max = rows.min(0), rows.max(0)
            return
        total, apart = self.count + count, mean - self._mean
        self._squares = self._squares + squares + apart**2 * (self.count * count / total)
        self._mean = self._mean + apart * (count / total)
        self._min, self._max = np.minimum(self._min, rows.min(0)), np.maximum(self._max, rows.max(0))
        self.count = total

    def entries(self) -> dict[str, list[Any]]:
        """The statistics by LeRobot's names, as lists."""
        deviation = np.sqrt(self._squares / self.count)
        arrays = {"min": self._min, "max": self._max, "mean": self._mean, "std": deviation}
        return {**{name: array.tolist() for name, array in arrays.items()}, "count": [self.count]}


def write_lerobot(episodes: Iterable[SingleAgentEpisode], folder: Path, *, task: str, fps: float) -> tuple[int, int]:
    """Write episodes as a dataset of LeRobot's; returns the numbers of episodes and steps.

        folder    of the dataset, which is there once it is whole
        task      what is done in the episodes, in words
        fps       steps in a second, by which steps get times

    A row has `observation.state`, or `observation.KEY` for each part of a nested space, as it was before the step;
    `action`, or its parts; `next.reward`, `next.done` and `next.terminated`. The observation after an episode's last
    step, the module's outputs and policy versions are left out. Pictures are arrays, not videos.

    Raises DatasetError without the package pyarrow, where the folder is there, and for features that can't be held.
    """
    if not 0 < fps < float("inf"):
        raise DatasetError(f"fps is {fps}, expected steps in a second, above 0").see("dataset")
    with whole_folder(folder) as partial:
        return _write(episodes, partial, task, fps)


def _write(episodes: Iterable[SingleAgentEpisode], folder: Path, task: str, fps: float) -> tuple[int, int]:
    """Write all files into a folder; the numbers of episodes and steps."""
    totals: dict[str, FeatureStats] = {}
    features: dict[str, Any] = {}
    records: list[dict[str, Any]] = []
    steps = 0
    with _StepFiles(folder) as files:
        for number, episode in enumerate(episodes):
            columns = _columns_of(episode, number, steps, fps)
            features = features or {name: _feature_of(name, values) for name, values in columns.items()}
            own = {name: FeatureStats() for name in columns}
            for name, values in columns.items():
                for each in (own[name], totals.setdefault(name, FeatureStats())):
                    each.add(values)
            chunk, file = files.write(columns)
            begin, steps = steps, steps + len(episode)
            records.append(
                {
                    "episode_index": number,
                    "tasks": [task],
                    "length": len(episode),
                    "data/chunk_index": chunk,
                    "data/file_index": file,
                    "dataset_from_index": begin,
                    "dataset_to_index": steps,
                    "meta/episodes/chunk_index": 0,
                    "meta/episodes/file_index": 0,
                    **{f"stats/{name}/{key}": value for name in own for key, value in own[name].entries().items()},
                }
            )
    if not records:
        raise DatasetError("there is no episode to be written, expected one or more").see("dataset")
    _write_tables(folder / "meta", records, task)
    _write_json(folder / "meta/stats.json", {name: each.entries() for name, each in totals.items()})
    _write_json(folder / "meta/info.json", _info(features, len(records), steps, fps))
    return len(records), steps


class _StepFiles:
    """Files of steps, one after the other; none is larger than it may be by more than an episode."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number, self._bytes = 0, 0
        self._writer: Any = None

    def __enter__(self) -> "_StepFiles":
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def write(self, columns: Mapping[str, NDArray[Any]]) -> tuple[int, int]:
        """Write the steps of an episode as one row group; the numbers of the chunk and of the file in it."""
        pa, pq = import_pyarrow()
        table = pa.table({name: _arrow_of(values) for name, values in columns.items()})
        if self._writer is not None and self._bytes >= _FILE_MB << 20:
            self._writer.close()
            self._writer, self._bytes, self._number = None, 0, self._number + 1
        chunk, file = divmod(self._number, _FILES_OF_A_CHUNK)
        if self._writer is None:
            path = self._folder / _DATA.format(chunk_index=chunk, file_index=file)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(path, table.schema)
        self._writer.write_table(table, row_group_size=len(table))
        self._bytes += table.nbytes
        return chunk, file


def _columns_of(episode: SingleAgentEpisode, number: int, begin: int, fps: float) -> dict[str, NDArray[Any]]:
    """The columns of an episode by LeRobot's names, any[n, *shape]; scalars are of the shape [1], as it has them."""
    count = len(episode)
    is_last = np.arange(count) == count - 1
    columns: dict[str, NDArray[Any]] = {}
    observations = _flat("observation", episode.get_observations(slice(0, count)), "observation.state")
    for name, values in chain(observations, _flat("action", episode.get_actions(), "action")):
        if name in columns:
            text = f"two parts of a space are called {name}, expected other keys of the Dicts"
            raise DatasetError(text).see("dataset")
        columns[name] = values
    columns["next.reward"] = np.asarray(episode.get_rewards(), np.float32)
    columns["next.done"], columns["next.terminated"] = is_last, is_last & episode.is_terminated
    places = np.arange(count)
    numbers = (places / fps).astype(np.float32), places, np.full(count, number), places + begin, np.zeros(count, int)
    columns |= dict(zip(_NUMBERS, numbers, strict=True))
    return {name: values.reshape(count, -1) if values.ndim == 1 else values for name, values in columns.items()}


def _flat(prefix: str, tree: Tree, alone: str) -> Iterator[tuple[str, NDArray[Any]]]:
    """The leaves of a tree, by names with the keys of Dicts and the places of Tuples; of one leaf `alone`."""
    if isinstance(tree, dict | tuple):
        parts = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, part in parts:
            name = f"{prefix}.{key}"
            if "/" in name:
                raise DatasetError(f"{name} has a '/', which LeRobot's features can't have").see("dataset")
            yield from _flat(name, part, name)
    else:
        yield alone, np.asarray(tree)


def _feature_of(name: str, values: NDArray[Any]) -> dict[str, Any]:
    """The description of a feature in `info.json`."""
    shape = list(values.shape[1:])
    if len(shape) > _MOST_DIMENSIONS or 0 in shape:
        raise DatasetError(
            f"{name} has items of the shape {shape}, expected 1 to {_MOST_DIMENSIONS} dimensions, none 0"
        )
    return {"dtype": values.dtype.name, "shape": shape, "names": None}


def _arrow_of(values: NDArray[Any]) -> Any:
    """Rows any[n, *shape] as Arrow has them: numbers for the shape [1], a list of fixed length, or lists of lists."""
    pa, _ = import_pyarrow()
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    shape = values.shape[1:]
    if shape == (1,):
        return flat
    if len(shape) == 1:
        return pa.FixedSizeListArray.from_arrays(flat, shape[0])
    for size in reversed(shape):
        flat = pa.ListArray.from_arrays(pa.array(np.arange(0, len(flat) + 1, size, dtype=np.int32)), flat)
    return flat


def _write_tables(meta: Path, records: list[dict[str, Any]], task: str) -> None:
    """Write the table of episodes, and that of tasks, whose index is the task's text as pandas has it."""
    pa, pq = import_pyarrow()
    path = meta.parent / _EPISODES.format(chunk_index=0, file_index=0)
    path.parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(records), path)
    columns = [("task_index", "int64", "int64"), ("task", "unicode", "object")]
    names = ("name", "field_name", "pandas_type", "numpy_type", "metadata")
    entries = [dict(zip(names, (name, name, *kinds, None), strict=True)) for name, *kinds in columns]
    index = {"index_columns": ["task"], "column_indexes": [], "columns": entries, "pandas_version": "2.2.0"}
    tasks = pa.table({"task_index": pa.array([0], pa.int64()), "task": pa.array([task], pa.string())})
    pq.write_table(tasks.replace_schema_metadata({"pandas": json.dumps(index)}), meta / "tasks.parquet")


def _info(features: Mapping[str, Any], episodes: int, steps: int, fps: float) -> dict[str, Any]:
    return {
        "codebase_version": "v3.0",
        "robot_type": None,
        "total_episodes": episodes,
        "total_frames": steps,
        "total_tasks": 1,
        "chunks_size": _FILES_OF_A_CHUNK,
        "data_files_size_in_mb": _FILE_MB,
        "video_files_size_in_mb": 500,
        "fps": int(fps) if float(fps).is_integer() else fps,
        "splits": {"train": f"0:{episodes}"},
        "data_path": _DATA,
        "video_path": None,
        "features": dict(features),
    }


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=4))
