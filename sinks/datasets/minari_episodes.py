"""Minari's datasets: read as episodes, and written from the episodes of a dataset, without a loss.

ID/data/metadata.json     spaces, counts, id
ID/data/main_data.hdf5    a group `episode_N` for each episode, with a row more of observations than of actions
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rollflow.sinks.datasets.arrow_columns import Description
from rollflow.sinks.datasets.dataset_folder import environment_of, whole_folder
from rollflow.sinks.datasets.episode_block import (
    FilledSteps,
    Ints,
    StoredSteps,
    check_wanted,
    columns_of_spaces,
    copy_rows,
)
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import DatasetError
from rollflow.stream.data.tree import Tree, map_tree
from rollflow.stream.fragments.fragment import Fragment

_DATA, _METADATA, _ARRAYS = "data", "metadata.json", "main_data.hdf5"
_FLAGS = {Columns.TERMINATEDS: "terminations", Columns.TRUNCATEDS: "truncations"}
_KEYS = {Columns.OBS: "observations", Columns.ACTIONS: "actions", Columns.REWARDS: "rewards", **_FLAGS}
_ID = re.compile(r"([-\w]+/)*[-\w]+-v\d+")


def minari_data_of(path: Path) -> Path | None:
    """The folder with Minari's files, for a dataset's folder or its `data`; None if it is no dataset of Minari's."""
    found = [each for each in (path / _DATA, path) if (each / _METADATA).is_file()]
    return found[0] if found else None


class MinariEpisodes:
    """Episodes of a dataset of Minari's: an `EpisodeStore`.

    data    folder with the files: `minari_data_of`

    Raises DatasetError without the package minari, and where it can't read the dataset.
    """

    def __init__(self, data: Path) -> None:
        self._data = data
        try:
            self._storage = _import_storage().read(data)
            metadata = self._storage.metadata
            records = list(self._storage.get_episode_metadata(range(self._storage.total_episodes)))
        except (OSError, ValueError, KeyError, AssertionError, json.JSONDecodeError) as error:
            raise self._damaged(error) from error
        spaces = metadata["observation_space"], metadata["action_space"]
        self.observation_space: gym.Space[Any] | None = spaces[0]
        self.action_space: gym.Space[Any] = spaces[1]
        self.columns: Mapping[str, Description] = columns_of_spaces(*spaces)
        self.num_steps: Ints = np.array([int(each["total_steps"]) for each in records], np.int64)
        if not len(records) or not self.num_steps.all():
            raise DatasetError(f"{data} has an episode without steps, or no episode, expected steps").see("dataset")
        self.t_started: Ints = np.zeros(len(records), np.int64)
        self.runs: Ints = np.zeros(len(records), np.int64)
        self.ids: NDArray[np.object_] = np.array([f"episode_{number}" for number in range(len(records))], object)
        self.lost: Mapping[int, str] = {}
        self.version = [str(metadata.get("dataset_id")), len(records)]
        plain = {key: value for key, value in metadata.items() if isinstance(value, str | int | float | bool)}
        env = _env_id_of(plain.get("env_spec"))
        rollout = None if env is None else {"env": env}
        self.description: dict[str, Any] = {"runs": [{"metadata": plain, "rollout": rollout, "versions": {}}]}

    def read(self, episodes: Ints, names: Collection[str], *, with_last: bool) -> StoredSteps:
        """Read the steps of episodes: see `EpisodeStore`."""
        made = FilledSteps.of(self, episodes, names, with_last=with_last)
        try:
            for place, episode in enumerate(self._storage.get_episodes(episodes.tolist())):
                check_wanted()
                count, end = int(self.num_steps[episodes[place]]), int(made.stop[place])
                for name, tree in made.columns.items():
                    copy_rows(tree, episode[_KEYS[name]], slice(end - count, end), slice(count))
                if made.last_obs is not None:
                    copy_rows(made.last_obs, episode["observations"], place, count)
        except (OSError, ValueError, KeyError, AssertionError) as error:
            raise self._damaged(error) from error
        return made.steps()

    def _damaged(self, error: Exception) -> DatasetError:
        return DatasetError(f"minari can't read {self._data}: {type(error).__name__}: {error}").see("dataset")


def write_minari(
    fragments: Iterable[Fragment],
    spaces: tuple[gym.Space[Any] | None, gym.Space[Any]],
    description: Mapping[str, Any],
    dataset_id: str,
    root: Path | None = None,
) -> Path:
    """Write episodes as a dataset of Minari's; returns its folder, which is there once it is whole.

        fragments      of whole episodes, as a `DatasetSource` with `complete_episodes` gives them
        spaces         of observations and actions
        description    as in `dataset.json`
        dataset_id     such as `cartpole/expert-v0`, by which `minari.load_dataset` finds it
        root           None: where Minari keeps its datasets

    Observations, actions, rewards and flags are written; pictures as they are, not as JPEG. The module's outputs are
    left out. Raises DatasetError without the package minari, for an id that Minari can't have, and where there is such
    a dataset.
    """
    storage_class = _import_storage()
    if not _ID.fullmatch(dataset_id):
        raise DatasetError(f"the id is {dataset_id!r}, expected NAME-v0, or NAMESPACE/NAME-v0")
    if root is None:
        from minari.storage import get_dataset_path

        root = get_dataset_path()
    folder = root.absolute() / dataset_id  # Minari joins a path that is not absolute to itself
    with whole_folder(folder) as partial:
        data = partial / _DATA
        data.mkdir()
        env_spec = _env_spec_of(description)
        storage = storage_class.new(data, *spaces, env_spec, data_format="hdf5", jpeg_encoding=False)
        total_episodes, total_steps = _write_arrays(data / _ARRAYS, fragments)
        storage.update_metadata(_facts_of(dataset_id, total_episodes, total_steps, storage.get_size()))
    return folder


def _write_arrays(path: Path, fragments: Iterable[Fragment]) -> tuple[int, int]:
    """Write a group for each episode; the numbers of episodes and steps."""
    import h5py

    number = steps = 0
    with h5py.File(path, "w", track_order=True) as file:
        for fragment in fragments:
            chunks = fragment.chunks
            lengths: Ints = chunks.stop - chunks.start
            ends = np.cumsum(lengths)
            columns = {_KEYS[name]: fragment.gather(name) for name in _KEYS if name not in _FLAGS}
            columns["observations"] = map_tree(
                lambda leaf, last, ends=ends: np.insert(leaf, ends, last, axis=0),
                columns["observations"],
                fragment.last_observations(),
            )
            for name, flags in (("terminations", chunks.terminated), ("truncations", chunks.truncated)):
                columns[name] = np.zeros(fragment.num_steps, np.bool_)
                columns[name][ends - 1] = flags
            for place, (length, end) in enumerate(zip(lengths.tolist(), ends.tolist(), strict=True)):
                group = file.create_group(f"episode_{number}")
                group.attrs["id"], group.attrs["total_steps"] = number, length
                for name, tree in columns.items():
                    # Each episode has one observation more than steps.
                    begin, more = (end - length + place, 1) if name == "observations" else (end - length, 0)
                    _write_rows(group, name, tree, slice(begin, begin + length + more))
                number += 1
            steps += fragment.num_steps
    return number, steps


def _write_rows(group: Any, name: str, tree: Tree, rows: slice) -> None:
    """Write some rows of a tree of arrays: a dataset, or a group of them; the parts of a tuple are `_index_0`, …."""
    if isinstance(tree, tuple | list):
        tree = {f"_index_{place}": part for place, part in enumerate(tree)}
    if not isinstance(tree, dict):
        group.create_dataset(name, data=tree[rows])
        return
    inner = group.create_group(name)
    for key, part in tree.items():
        _write_rows(inner, key, part, rows)


def _facts_of(dataset_id: str, total_episodes: int, total_steps: int, size: float) -> dict[str, Any]:
    import minari

    return {
        "dataset_id": dataset_id,
        "minari_version": minari.__version__,
        "total_episodes": total_episodes,
        "total_steps": total_steps,
        "dataset_size": size,
    }


def _env_spec_of(description: Mapping[str, Any]) -> Any:
    """The spec of the environment that all runs are of, if gymnasium has it here."""
    names = {environment_of(run) for run in description["runs"]}
    name = names.pop()
    return gym.registry.get(name) if name is not None and not names else None


def _env_id_of(env_spec: Any) -> str | None:
    """The environment's id in a specification that Minari has kept as JSON; None: it has none."""
    try:
        found = json.loads(env_spec)["id"]
    except (ValueError, TypeError, KeyError):
        return None
    return found if isinstance(found, str) else None


def _import_storage() -> Any:
    """Minari's class that reads and writes datasets. Raises DatasetError where a package is missing."""
    try:
        import h5py  # noqa: F401
        import PIL.Image  # noqa: F401
        from minari.dataset.minari_storage import MinariStorage
    except ImportError as error:
        raise DatasetError(
            f"datasets of Minari take the packages minari, h5py and pillow: {error}; pip install 'rollflow[minari]'"
        ).see("dataset") from None
    return MinariStorage
