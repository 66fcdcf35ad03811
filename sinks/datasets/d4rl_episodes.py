"""D4RL's files, HDF5 with the steps of all episodes end to end: read as episodes.

observations         any[R, ...]  before each step
actions, rewards     any[R, ...], number[R]
terminals            bool[R]      whether the step terminated its episode
timeouts             bool[R]      whether the step was its episode's last for another reason; may be missing
next_observations    any[R, ...]  after each step; may be missing
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rollflow.sinks.datasets.arrow_columns import Description
from rollflow.sinks.datasets.episode_block import FilledSteps, columns_of_spaces
from rollflow.sinks.datasets.stored_steps import Ints, StoredSteps, check_wanted
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import DatasetError

_NEEDED = ("observations", "actions", "rewards", "terminals")
_TIMEOUTS, _NEXT = "timeouts", "next_observations"
_KEYS = {Columns.OBS: "observations", Columns.ACTIONS: "actions", Columns.REWARDS: "rewards"}


class D4rlEpisodes:
    """Episodes of a file of D4RL's: an `EpisodeStore`.

    path    of the file

    Spaces are those that the arrays have: a Box without bounds, or for whole numbers int[R] as actions a Discrete.
    Without `next_observations` nothing is known of what follows the last step of an episode that did not terminate:
    that step is left out, and its observation is the episode's last. A terminated episode's last observation, which
    counts for nothing, is then the one before. Raises DatasetError without the package h5py, and for other files.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._opened() as file:
            self._has_next = _NEXT in file
            self._check(file)
            terminal, timeout = (_bools(file, name) for name in ("terminals", _TIMEOUTS))
            spaces = _space_of(file["observations"]), _action_space_of(file["actions"])
            plain = {name: value for name, value in file.attrs.items() if isinstance(value, str | int | float)}
        is_end = terminal | timeout
        is_end[-1] = True
        ends = np.flatnonzero(is_end)
        begins = np.append(0, ends[:-1] + 1)
        num_steps = ends + 1 - begins - (0 if self._has_next else ~terminal[ends])
        kept = num_steps > 0
        if not kept.any():
            raise DatasetError(f"{path} has no step of which the next observation is known, expected some").see(
                "dataset"
            )
        self._begins, self._ends, self.num_steps = begins[kept], ends[kept], num_steps[kept]
        terminated = terminal[self._ends]
        self._flags = {Columns.TERMINATEDS: terminated, Columns.TRUNCATEDS: timeout[self._ends] & ~terminated}
        self.observation_space: gym.Space[Any] | None
        self.observation_space, self.action_space = spaces
        self.columns: Mapping[str, Description] = columns_of_spaces(*spaces)
        count = len(self.num_steps)
        self.t_started: Ints = np.zeros(count, np.int64)
        self.runs: Ints = np.zeros(count, np.int64)
        self.ids: NDArray[np.object_] = np.array([f"episode_{number}" for number in range(count)], object)
        self.lost: Mapping[int, str] = {}
        self.version = [path.name, len(is_end), count]
        self.description: dict[str, Any] = {"runs": [{"metadata": plain, "rollout": None, "versions": {}}]}

    def _check(self, file: Any) -> None:
        """Raise DatasetError unless the file has the arrays that are needed, all of one length above 0."""
        shapes = {name: getattr(file[name], "shape", ()) for name in (*_NEEDED, _TIMEOUTS, _NEXT) if name in file}
        lengths = {shape[:1] for shape in shapes.values()}
        if not shapes.keys() >= set(_NEEDED) or len(lengths) != 1 or not sum(lengths.pop()):
            raise DatasetError(
                f"{self._path} has arrays of the shapes {shapes}, expected {', '.join(_NEEDED)}, as D4RL has them, all "
                "of one length above 0"
            ).see("dataset")

    def read(self, episodes: Ints, names: Collection[str], *, with_last: bool) -> StoredSteps:
        """Read the steps of episodes: see `EpisodeStore`."""
        made = FilledSteps.of(self, episodes, names, with_last=with_last)
        columns = made.columns
        for name in columns.keys() & self._flags.keys():
            columns[name][:] = False
            columns[name][made.stop - 1] = self._flags[name][episodes]
        with self._opened() as file:
            for place, (episode, stop) in enumerate(zip(episodes.tolist(), made.stop.tolist(), strict=True)):
                check_wanted()
                begin, count, end = self._begins[episode], self.num_steps[episode], self._ends[episode]
                for name in columns.keys() & _KEYS.keys():
                    into = columns[name][stop - count : stop]
                    into[:] = file[_KEYS[name]][begin : begin + count].reshape(into.shape)
                if made.last_obs is not None:
                    made.last_obs[place] = file[_NEXT if self._has_next else "observations"][end]
        return made.steps()

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        """The file, for reading. Raises DatasetError, with its name, where it can't be read."""
        try:
            import h5py
        except ImportError:
            raise DatasetError(
                "files of D4RL take the package h5py, which is not installed: pip install 'rollflow[minari]'"
            ).see("dataset") from None
        try:
            with h5py.File(self._path, "r") as file:
                yield file
        except (OSError, KeyError) as error:
            raise DatasetError(f"{self._path} can't be read as HDF5: {error}").see("dataset") from error


def _bools(file: Any, name: str) -> NDArray[np.bool_]:
    """An array of flags, bool[R]; all False where the file has none."""
    return file[name][:].astype(np.bool_).reshape(-1) if name in file else np.zeros(len(file["rewards"]), np.bool_)


def _space_of(array: Any) -> gym.spaces.Box:
    """Box of one item of any[R, ...], with all values that its dtype allows."""
    dtype: Any = array.dtype
    if dtype == np.bool_:
        return gym.spaces.Box(0, 1, array.shape[1:], dtype)
    if np.issubdtype(dtype, np.integer):
        bounds = np.iinfo(dtype)
        return gym.spaces.Box(bounds.min, bounds.max, array.shape[1:], dtype)
    return gym.spaces.Box(-np.inf, np.inf, array.shape[1:], dtype)


def _action_space_of(array: Any) -> gym.Space[Any]:
    if array.ndim == 1 and np.issubdtype(array.dtype, np.integer) and array[:].min(initial=0) >= 0:
        return gym.spaces.Discrete(int(array[:].max(initial=0)) + 1)
    return _space_of(array)
