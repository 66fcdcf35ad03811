"""Files of D4RL's: how their arrays become episodes, and which files are refused."""

from pathlib import Path
from typing import Any

import gymnasium as gym
import h5py
import numpy as np
import pytest

from rollflow.sinks import DatasetSource
from rollflow.stream import DatasetError

# Three steps up to a termination, two up to a time limit, and two of an episode that goes on.
TERMINALS, TIMEOUTS = [0, 0, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 0, 0]


def written(path: Path, **arrays: Any) -> Path:
    """A file in which observation and action of row r are r and -r; arrays of None are left out."""
    rows = np.arange(7, dtype=np.float32)
    made: dict[str, Any] = {
        "observations": np.stack([rows, 10 * rows], 1),
        "actions": -rows[:, None],
        "rewards": rows,
        "terminals": np.array(TERMINALS, bool),
        "timeouts": np.array(TIMEOUTS, bool),
    }
    with h5py.File(path, "w") as file:
        file.attrs["algorithm"] = "by hand"
        file.create_group("infos").create_dataset("qpos", data=np.zeros((7, 9)))
        for name, array in {**made, **arrays}.items():
            if array is not None:
                file.create_dataset(name, data=array)
    return path


def firsts(episode: Any) -> list[float]:
    """The first number of each observation of an episode."""
    return [float(each) for each in episode.get_observations()[:, 0]]


def test_steps_end_to_end_become_episodes_with_their_next_observations(tmp_path: Path) -> None:
    rows = np.arange(7, dtype=np.float32)
    path = written(tmp_path / "hopper.hdf5", next_observations=np.stack([rows + 0.5, rows], 1))
    source = DatasetSource(path)
    assert source.observation_space == gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    assert source.action_space == gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    assert source.description["runs"][0]["metadata"] == {"algorithm": "by hand"}
    episodes = list(source.episodes())
    assert [firsts(each) for each in episodes] == [[0, 1, 2, 2.5], [3, 4, 4.5], [5, 6, 6.5]]
    assert [each.get_rewards().tolist() for each in episodes] == [[0, 1, 2], [3, 4], [5, 6]]
    assert episodes[1].get_actions().tolist() == [[-3], [-4]]
    ends = [(each.is_terminated, each.is_truncated, "cut" in each.custom_data) for each in episodes]
    assert ends == [(True, False, False), (False, True, False), (False, True, True)]
    assert source.summary().is_whole.tolist() == [True, True, False]


def test_without_next_observations_the_last_step_of_a_truncated_episode_is_left_out(tmp_path: Path) -> None:
    source = DatasetSource(written(tmp_path / "hopper.hdf5"))
    episodes = list(source.episodes())
    assert [firsts(each) for each in episodes] == [[0, 1, 2, 2], [3, 4], [5, 6]]
    assert [each.is_terminated for each in episodes] == [True, False, False]
    assert [each.get_rewards().tolist() for each in episodes] == [[0, 1, 2], [3], [5]]
    assert source.num_steps == 5


def test_batches_are_shuffled_and_resumed_as_from_any_dataset(tmp_path: Path) -> None:
    path = written(tmp_path / "hopper.hdf5")
    settings: Any = {"batch_size": 2, "shuffle_seed": 3, "passes": 2}
    source = DatasetSource(path, **settings)
    batches = [batch["rewards"].tolist() for batch in source.batches()]
    assert sorted(reward for batch in batches for reward in batch) == sorted([0.0, 1, 2, 3, 5] * 2)
    again = DatasetSource(path, **settings)
    loop = again.batches()
    assert next(loop)["rewards"].tolist() == batches[0]
    other = DatasetSource(path, **settings)
    other.load_state_dict(again.state_dict())
    assert [batch["rewards"].tolist() for batch in other.batches()] == batches[1:]


def test_whole_numbers_are_discrete_actions_and_pictures_keep_their_bytes(tmp_path: Path) -> None:
    pictures = np.arange(7 * 4, dtype=np.uint8).reshape(7, 2, 2)
    path = written(tmp_path / "a.h5", actions=np.array([0, 1, 2, 1, 0, 1, 0]), observations=pictures, timeouts=None)
    source = DatasetSource(path)
    assert source.action_space == gym.spaces.Discrete(3)
    assert source.observation_space == gym.spaces.Box(0, 255, (2, 2), np.uint8)
    first, second = source.episodes()
    assert first.get_actions().tolist() == [0, 1, 2]
    assert second.get_observations().tolist() == pictures[3:].tolist()


def test_whole_numbers_below_zero_are_no_discrete_actions(tmp_path: Path) -> None:
    path = written(tmp_path / "a.h5", actions=np.array([0, -1, 2, 1, 0, 1, 0], np.int8))
    assert DatasetSource(path).action_space == gym.spaces.Box(-128, 127, (), np.int8)


def test_flags_as_observations_are_a_box_of_flags(tmp_path: Path) -> None:
    path = written(tmp_path / "a.h5", observations=np.ones((7, 2), np.bool_))
    assert DatasetSource(path).observation_space == gym.spaces.Box(0, 1, (2,), np.bool_)


def test_an_episode_of_one_step_that_nothing_follows_is_left_out(tmp_path: Path) -> None:
    path = written(tmp_path / "a.hdf5", timeouts=np.array([0, 0, 0, 0, 0, 1, 0], bool))  # row 6 alone is the third
    assert [len(each) for each in DatasetSource(path).episodes()] == [3, 2]
    none = written(tmp_path / "none.hdf5", timeouts=np.ones(7, bool), terminals=np.zeros(7, bool))
    with pytest.raises(DatasetError, match="has no step of which the next observation is known"):
        DatasetSource(none)


EMPTY = dict.fromkeys(("observations", "actions", "rewards", "terminals", "timeouts"), np.zeros(0, np.float32))


@pytest.mark.parametrize("arrays", [{"terminals": None}, {"rewards": np.zeros(6, np.float32)}, EMPTY])
def test_other_arrays_are_refused(tmp_path: Path, arrays: dict[str, Any]) -> None:
    with pytest.raises(DatasetError, match="expected observations, actions, rewards, terminals, as D4RL has them"):
        DatasetSource(written(tmp_path / "a.hdf5", **arrays))


def test_other_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.hdf5").write_bytes(b"no")
    with pytest.raises(DatasetError, match=r"a\.hdf5 can't be read as HDF5"):
        DatasetSource(tmp_path / "a.hdf5")
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    with pytest.raises(DatasetError, match=r"pip install 'rollflow\[minari\]'"):
        DatasetSource(tmp_path / "a.hdf5")
