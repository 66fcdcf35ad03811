"""Datasets of Minari's: its own library reads what is written, and what it has written is read."""

from pathlib import Path
from typing import Any

import gymnasium as gym
import minari
import numpy as np
import pytest
from minari.data_collector import EpisodeBuffer
from replayed import Played, write_dataset
from shapes_env import FixedModule, Shapes

from rollflow import DatasetSource, Rollout
from rollflow.nodes import RandomModule
from rollflow.sinks.datasets.dataset_folder import environment_of
from rollflow.sinks.datasets.minari_episodes import write_minari
from rollflow.stream import DatasetError
from rollflow.stream.data.tree import equal_trees


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    return tmp_path / "minari"


@pytest.fixture
def source(tmp_path: Path) -> DatasetSource:
    """A small dataset of one agent."""
    write_dataset(Played(slots=1, fragments=1).fragments, tmp_path / "data")
    return DatasetSource(tmp_path / "data", batch_size=20, complete_episodes=True)


def recorded(path: Path, env: Any, module: Any, **options: Any) -> DatasetSource:
    """A dataset of a rollout."""
    with Rollout(env, module=module, num_fragments=3, fragment_length=16, seed=0, **options) as rollout:
        write_dataset(rollout.fragments(), path, rollout=rollout)
    return DatasetSource(path, batch_size=20, complete_episodes=True)


def convert(source: DatasetSource, dataset_id: str, *root: Path, fragments: Any = None) -> Path:
    spaces = source.observation_space, source.action_space
    return write_minari(fragments or source.fragments(), spaces, source.description, dataset_id, *root)


def test_minari_opens_what_is_written(tmp_path: Path, root: Path) -> None:
    source = recorded(tmp_path / "data", "CartPole-v1", RandomModule, num_envs=3)
    assert convert(source, "cartpole/random-v0") == root / "cartpole/random-v0"
    dataset = minari.load_dataset("cartpole/random-v0")
    assert (dataset.total_episodes, dataset.total_steps) == (source.num_episodes, source.num_steps)
    assert dataset.env_spec.id == "CartPole-v1"
    [run] = DatasetSource(root / "cartpole/random-v0").description["runs"]
    assert environment_of(run) == "CartPole-v1"
    assert list(minari.list_local_datasets()) == ["cartpole/random-v0"]
    for theirs, ours in zip(dataset.iterate_episodes(), DatasetSource(tmp_path / "data").episodes(), strict=True):
        np.testing.assert_array_equal(theirs.observations, ours.get_observations())
        np.testing.assert_array_equal(theirs.actions, ours.get_actions())
        np.testing.assert_array_equal(theirs.rewards, ours.get_rewards())
        assert (bool(theirs.terminations[-1]), bool(theirs.truncations[-1])) == (ours.is_terminated, ours.is_truncated)
        assert not (theirs.terminations | theirs.truncations)[:-1].any()


def test_pictures_and_nested_spaces_come_back_to_the_bit(tmp_path: Path, root: Path) -> None:
    source = recorded(tmp_path / "data", [Shapes, Shapes], FixedModule())
    back = DatasetSource(convert(source, "shapes-v1"))
    assert (back.observation_space, back.action_space) == (Shapes.observation_space, Shapes.action_space)
    episodes = list(zip(back.episodes(), DatasetSource(tmp_path / "data").episodes(), strict=True))
    assert len(episodes) == source.num_episodes
    for one, other in episodes:
        assert equal_trees(one.get_observations(), other.get_observations())
        assert equal_trees(one.get_actions(), other.get_actions())
    theirs = minari.load_dataset("shapes-v1")[0]
    assert theirs.observations["picture"].dtype == np.uint8
    assert back.columns["obs"] == source.columns["obs"]


def test_what_minari_has_written_is_a_source_and_can_be_written_on(tmp_path: Path, root: Path) -> None:
    space, actions = gym.spaces.Box(-9, 9, (2,), np.float32), gym.spaces.Discrete(3)
    buffers = [
        EpisodeBuffer(
            observations=[np.array([number, step], np.float32) for step in range(length + 1)],
            actions=[step % 3 for step in range(length)],
            rewards=[float(step) for step in range(length)],
            terminations=[number == 0 and step == length - 1 for step in range(length)],
            truncations=[number == 1 and step == length - 1 for step in range(length)],
        )
        for number, length in enumerate((3, 1, 4))
    ]
    with pytest.warns(UserWarning, match="is set to None|env_spec is None"):
        minari.create_dataset_from_buffers("mine-v0", buffers, observation_space=space, action_space=actions)
    source = DatasetSource(root / "mine-v0")
    episodes = list(source.episodes())
    assert [len(each) for each in episodes] == [3, 1, 4]
    assert [each.is_terminated for each in episodes] == [True, False, False]
    assert [each.is_truncated for each in episodes] == [False, True, True]
    assert ["cut" in each.custom_data for each in episodes] == [False, False, True]
    assert episodes[2].get_observations().tolist() == [[2, 0], [2, 1], [2, 2], [2, 3], [2, 4]]
    assert episodes[2].get_rewards().tolist() == [0, 1, 2, 3]
    assert source.summary().returns.tolist() == [3, 0, 6]
    (batch,) = DatasetSource(root / "mine-v0" / "data", batch_size=8).batches()
    assert batch["actions"].tolist() == [0, 1, 2, 0, 0, 1, 2, 0]
    write_dataset(DatasetSource(root / "mine-v0", batch_size=3).fragments(), tmp_path / "ours")
    for one, other in zip(DatasetSource(tmp_path / "ours").episodes(), episodes, strict=True):
        assert equal_trees(one.get_observations(), other.get_observations())
        assert one.custom_data == other.custom_data


def test_a_folder_may_be_named_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = recorded(tmp_path / "data", "CartPole-v1", RandomModule, num_envs=1)
    monkeypatch.chdir(tmp_path)
    assert convert(source, "mine-v0", Path("here")) == tmp_path / "here/mine-v0"
    assert DatasetSource("here/mine-v0").num_steps == source.num_steps


def test_ids_and_folders_that_can_not_be_are_refused(source: DatasetSource, root: Path) -> None:
    with pytest.raises(DatasetError, match="the id is 'mine', expected NAME-v0"):
        convert(source, "mine")
    convert(source, "mine-v0")
    with pytest.raises(DatasetError, match=f"{root}/mine-v0 is there already"):
        convert(source, "mine-v0")
    (root / "mine-v0/data/main_data.hdf5").write_bytes(b"no")
    with pytest.raises(DatasetError, match=f"minari can't read {root}/mine-v0/data: "):
        DatasetSource(root / "mine-v0")
    assert [each.name for each in root.iterdir()] == ["mine-v0"]


def test_what_can_not_be_read_to_its_end_leaves_nothing(source: DatasetSource, root: Path) -> None:

    def fragments() -> Any:
        yield from source.fragments()
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        convert(source, "mine-v0", fragments=fragments())
    assert not list(root.iterdir())


def test_without_minari_the_extra_is_named(source: DatasetSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    with pytest.raises(DatasetError, match=r"pip install 'rollflow\[minari\]'"):
        convert(source, "mine-v0")
