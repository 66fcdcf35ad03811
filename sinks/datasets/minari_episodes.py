"""Minari's datasets: read as episodes, and written from the episodes of a dataset, without a loss.

ID/data/metadata.json     spaces, counts, id
ID/data/main_data.hdf5    a group `episode_N` for each episode, with a row more of observations than of actions
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rollflow.sinks.datasets.arrow_columns import Description, describe_tree, empty_tree
from rollflow.sinks.datasets.dataset_folder import environment_of, whole_folder
from rollflow.sinks.datasets.episode_block import Ints, StoredSteps, check_wanted
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import DatasetError
from rollflow.stream.data.space import row_of
from rollflow.stream.data.system import require_packages
from rollflow.stream.data.tree import Tree, concatenate_trees, map_tree
from rollflow.stream.fragments.fragment import Fragment

_DATA, _METADATA = "data", "metadata.json"
_KEYS = {
    Columns.OBS: "observations",
    Columns.ACTIONS: "actions",
    Columns.REWARDS: "rewards",
    Columns.TERMINATEDS: "terminations",
    Columns.TRUNCATEDS: "truncations",
}
_ID = re.compile(r"([-\w]+/)*[-\w]+-v\d+")


def minari_data_of(path: Path) -> Path | None:
    """The folder with Minari's files, for a dataset's folder or its `data`; None if it is no dataset of Minari's."""
    found = [each for each in (path / _DATA, path) if (each / _METADATA).is_file()]
    return found[0] if found else None


class MinariEpisodes:
    """Episodes of a dataset of Minari's: see `EpisodeStore`.

    data    folder with the files: `minari_data_of`

    Raises DatasetError without the package minari, and if it can't read the dataset.
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
        self.columns: Mapping[str, Description] = {
            Columns.OBS: describe_tree(row_of(spaces[0], 1), Columns.OBS),
            Columns.ACTIONS: describe_tree(row_of(spaces[1], 1), Columns.ACTIONS),
            Columns.REWARDS: {"dtype": "float32", "shape": []},
            Columns.TERMINATEDS: {"dtype": "bool", "shape": []},
            Columns.TRUNCATEDS: {"dtype": "bool", "shape": []},
        }
        self.num_steps: Ints = np.array([int(each["total_steps"]) for each in records], np.int64)
        if not len(records) or not self.num_steps.all():
            raise DatasetError(f"{data} has an episode without steps, or no episode, expected steps")
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
        parts: dict[str, list[Tree]] = {name: [] for name in names}
        counts, last_obs = self.num_steps[episodes], list[Tree]()
        try:
            for episode, count in zip(self._storage.get_episodes(episodes.tolist()), counts.tolist(), strict=True):
                check_wanted()
                for name, trees in parts.items():
                    trees.append(self._rows(name, episode[_KEYS[name]], 0, count))
                if with_last:
                    last_obs.append(self._rows(Columns.OBS, episode["observations"], count, count + 1))
        except (OSError, ValueError, KeyError, AssertionError) as error:
            raise self._damaged(error) from error
        return StoredSteps(parts, np.arange(counts.sum()), concatenate_trees(last_obs) if with_last else None)

    def _rows(self, name: str, tree: Tree, begin: int, end: int) -> Tree:
        """Some rows of a column as minari reads it: a tree of arrays any[n, ...]."""
        return map_tree(
            lambda leaf, values: np.asarray(values[begin:end], leaf.dtype).reshape(end - begin, *leaf.shape[1:]),
            empty_tree(self.columns[name], 0),
            tree,
        )

    def _damaged(self, error: Exception) -> DatasetError:
        return DatasetError(f"minari can't read {self._data}: {type(error).__name__}: {error}")


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
    left out. Raises DatasetError without the package minari, for an id that Minari can't have, and if there is such
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
        storage.update_episodes(_buffers_of(fragments))
        storage.update_metadata({"dataset_id": dataset_id, "minari_version": version("minari")})
    return folder


def _buffers_of(fragments: Iterable[Fragment]) -> Iterator[Any]:
    """Episodes as Minari writes them."""
    from minari.data_collector import EpisodeBuffer

    for fragment in fragments:
        for episode in fragment.episodes():
            is_last = np.arange(len(episode)) == len(episode) - 1
            yield EpisodeBuffer(
                observations=episode.get_observations(),
                actions=episode.get_actions(),
                rewards=episode.get_rewards(),
                terminations=is_last & episode.is_terminated,
                truncations=is_last & episode.is_truncated,
            )


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
    """Minari's class that reads and writes datasets. Raises DatasetError if a package is missing."""
    require_packages("a dataset of Minari's", "minari", "minari", "h5py", "PIL", error=DatasetError)
    from minari.dataset.minari_storage import MinariStorage

    return MinariStorage
