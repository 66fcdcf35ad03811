"""RLlib's Parquet files of episodes: read as episodes.

A row has one column, `item`: the state of a `SingleAgentEpisode` in msgpack, whose arrays are as msgpack-numpy has
them. It is a chunk of an episode, which goes on in another row. A chunk may come again in later files.
"""

import base64
import io
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import msgpack
import numpy as np
from numpy.typing import NDArray

from rollflow.sinks.datasets.arrow_columns import Description, import_pyarrow
from rollflow.sinks.datasets.dataset_folder import DESCRIPTION
from rollflow.sinks.datasets.episode_block import FilledSteps, columns_of_spaces, copy_rows
from rollflow.sinks.datasets.episode_index import UNREADABLE, damaged
from rollflow.sinks.datasets.stored_steps import Ints, StoredSteps, check_wanted
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import DatasetError
from rollflow.stream.data.tree import Tree, map_tree, stack_trees

_ITEM = "item"
_BUFFERS = {Columns.OBS: "observations", Columns.ACTIONS: "actions", Columns.REWARDS: "rewards"}
_SPACES = ("_observation_space", "_action_space")
_FLAGS = {Columns.TERMINATEDS: "is_terminated", Columns.TRUNCATEDS: "is_truncated"}
_NEEDED = {"id_", "t_started", "t", *_BUFFERS.values(), *_FLAGS.values(), *_SPACES}


def rllib_files_of(path: Path) -> list[Path]:
    """The files of RLlib's in a folder, and in those below it; none if it is another kind of folder."""
    if (path / DESCRIPTION).exists() or not (files := sorted(path.rglob("*.parquet"))):
        return []
    _, parquet = import_pyarrow()
    try:
        return files if parquet.read_schema(files[0]).names == [_ITEM] else []
    except UNREADABLE as error:
        raise damaged(files[0], error) from None


class _Chunk(NamedTuple):
    """Where a chunk is stored, and the steps that it has."""

    id: str
    begin: int
    end: int
    file: int
    row: int


class RllibEpisodes:
    """Episodes that RLlib has written: an `EpisodeStore`.

    path     folder with the files, for errors
    files    as `rllib_files_of` gives them

    Chunks of an episode are put together; one that is there twice, or within another, counts once. Where one is
    missing, another episode begins. The outputs of the module and infos are not read. Raises DatasetError for a file
    that can't be read, for chunks that overlap, for several kinds of spaces, and for episodes of several agents.
    """

    def __init__(self, path: Path, files: list[Path]) -> None:
        self._files = files
        chunks: dict[tuple[str, int], _Chunk] = {}
        records: tuple[Any, Any] | None = None
        for number in range(len(files)):
            for row, state in enumerate(self._states(number)):
                chunk = _Chunk(str(state["id_"]), int(state["t_started"]), int(state["t"]), number, row)
                known = chunks.get(chunk[:2])
                if chunk.end > (chunk.begin if known is None else known.end):
                    chunks[chunk[:2]] = chunk
                found = state[_SPACES[0]], state[_SPACES[1]]
                records = records or found
                if found != records:
                    raise DatasetError(
                        f"{files[number]} has the spaces {str(found)[:200]}, expected those of the episodes before, "
                        f"{str(records)[:200]}"
                    ).see("dataset")
        if records is None or not chunks:
            raise DatasetError(f"{path} has no steps, expected RLlib's episodes with some").see("dataset")
        spaces = _space_of(records[0]), _space_of(records[1])
        self.observation_space: gym.Space[Any] | None
        self.observation_space, self.action_space = spaces
        self.columns: Mapping[str, Description] = columns_of_spaces(*spaces)
        self._episodes = list(_joined(chunks.values()))
        self.num_steps: Ints = np.array([each[-1].end - each[0].begin for each in self._episodes], np.int64)
        self.t_started: Ints = np.array([each[0].begin for each in self._episodes], np.int64)
        self.ids: NDArray[np.object_] = np.array([each[0].id for each in self._episodes], object)
        self.runs: Ints = np.zeros(len(self._episodes), np.int64)
        self.lost: Mapping[int, str] = {}
        self.version = [[str(file.relative_to(path)) for file in files], len(self._episodes)]
        self.description: dict[str, Any] = {"runs": [{"metadata": {}, "rollout": None, "versions": {}}]}

    def read(self, episodes: Ints, names: Collection[str], *, with_last: bool) -> StoredSteps:
        """Read the steps of episodes: see `EpisodeStore`."""
        made = FilledSteps.of(self, episodes, names, with_last=with_last)
        places: dict[int, dict[int, tuple[int, int, bool]]] = {}  # file -> row -> (first step here, episode, is last)
        for place, (episode, stop) in enumerate(zip(episodes.tolist(), made.stop.tolist(), strict=True)):
            chunks = self._episodes[episode]
            for chunk in chunks:
                at = stop - (chunks[-1].end - chunk.begin)
                places.setdefault(chunk.file, {})[chunk.row] = at, place, chunk is chunks[-1]
        for file, rows in places.items():
            check_wanted()
            for row, state in enumerate(self._states(file)):
                try:
                    if row in rows:
                        _read(state, made.columns, made.last_obs, *rows[row])
                except UNREADABLE as error:
                    raise damaged(self._files[file], error) from None
        return made.steps()

    def _states(self, number: int) -> Iterator[dict[str, Any]]:
        """The states in a file, row by row. Raises DatasetError, with its name, where it has others."""
        _, parquet = import_pyarrow()
        file = self._files[number]
        try:
            rows = parquet.read_table(file, columns=[_ITEM]).column(_ITEM).to_pylist()
        except UNREADABLE as error:
            raise damaged(file, error) from None
        for row in rows:
            try:
                state = msgpack.unpackb(row, object_hook=_array_of, use_list=False, strict_map_key=False)
            except (*UNREADABLE, msgpack.UnpackException) as error:
                raise damaged(file, error) from None
            if not isinstance(state, dict) or not state.keys() >= _NEEDED:
                raise DatasetError(
                    f"{file} has rows with {sorted(state) if isinstance(state, dict) else type(state).__name__}, "
                    "expected states of episodes of one agent"
                ).see("dataset")
            yield state


def _read(
    state: Mapping[str, Any], columns: Mapping[str, Tree], last_obs: Tree | None, at: int, place: int, is_last: bool
) -> None:
    """Copy the steps of a chunk to the rows from `at` on, and what follows its episode's last chunk to `place`."""
    count = state["t"] - state["t_started"]
    for name in columns.keys() & _BUFFERS.keys():
        copy_rows(columns[name], _items_of(state[_BUFFERS[name]]), slice(at, at + count), slice(count))
    for name in columns.keys() & _FLAGS.keys():
        columns[name][at : at + count] = False
        columns[name][at + count - 1] = bool(state[_FLAGS[name]])
    if is_last and last_obs is not None:
        copy_rows(last_obs, _items_of(state[_BUFFERS[Columns.OBS]]), place, count)


def _joined(chunks: Iterable[_Chunk]) -> Iterator[list[_Chunk]]:
    """The chunks of each episode, in order, the episodes in the order in which they come first."""
    by_id: dict[str, list[_Chunk]] = {}
    for chunk in chunks:
        by_id.setdefault(chunk.id, []).append(chunk)
    for mine in by_id.values():
        mine.sort(key=lambda chunk: chunk.begin)
        episode = mine[:1]
        for chunk in mine[1:]:
            end = episode[-1].end
            if chunk.end <= end:
                continue  # all of it is there
            if chunk.begin < end:
                raise DatasetError(
                    f"episode {chunk.id} has chunks of steps {episode[-1].begin} to {end} and {chunk.begin} to "
                    f"{chunk.end}, expected none that overlap in part"
                ).see("dataset")
            if chunk.begin > end:
                yield episode
                episode = []
            episode.append(chunk)
        yield episode


def _array_of(value: dict[Any, Any]) -> Any:
    """The array or number of msgpack-numpy's form, or the dict itself; None for what is pickled in it."""
    if b"nd" not in value:
        return value
    if value.get(b"kind"):
        return None
    array = np.frombuffer(value[b"data"], np.dtype(value[b"type"]))
    return array.reshape(value[b"shape"]) if value[b"nd"] else array[0]


def _items_of(buffer: Mapping[str, Any]) -> Tree:
    """The items of a buffer's state without its lookback, as a tree of arrays any[n, ...]."""
    data = buffer["data"]
    items: Any = data if buffer["finalized"] else stack_trees([map_tree(np.asarray, each) for each in data])
    return map_tree(lambda leaf: leaf[buffer["lookback"] :], items)


def _space_of(record: Any) -> gym.Space[Any]:
    """The space of RLlib's description of one. Raises DatasetError for another than these."""
    kind = record.get("space") if isinstance(record, Mapping) else None
    if kind == "box":
        low, high = (_unpacked(record[name]) for name in ("low", "high"))
        return gym.spaces.Box(low, high, tuple(record["shape"]), np.dtype(record["dtype"]).type)
    if kind == "discrete":
        return gym.spaces.Discrete(int(record["n"]), start=int(record.get("start", 0)))
    if kind == "multi-discrete":
        return gym.spaces.MultiDiscrete(_unpacked(record["nvec"]), np.dtype(record["dtype"]).type)
    if kind == "dict":
        return gym.spaces.Dict({name: _space_of(part) for name, part in record["spaces"].items()})
    if kind == "tuple":
        return gym.spaces.Tuple([_space_of(part) for part in record["spaces"]])
    raise DatasetError(
        f"RLlib's episodes have the space {str(record)[:80]}, expected box, discrete, multi-discrete, dict or tuple"
    ).see("dataset")


def _unpacked(text: Any) -> NDArray[Any]:
    """The array of RLlib's text of one, a compressed .npy file."""
    array: NDArray[Any] = np.load(io.BytesIO(zlib.decompress(base64.b64decode(text))), allow_pickle=False)
    return array
