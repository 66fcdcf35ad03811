"""Datasets of LeRobot's, format v3.0: what is written is read back by pyarrow and pandas, and fits its schema."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from replayed import Played

from rollflow.cli.main import main
from rollflow.nodes import RandomModule, Rollout
from rollflow.sinks import DatasetSink, DatasetSource
from rollflow.sinks.datasets import lerobot_episodes
from rollflow.sinks.datasets.lerobot_episodes import FeatureStats, write_lerobot
from rollflow.stream import DatasetError, SingleAgentEpisode


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of CartPole."""
    path = tmp_path_factory.mktemp("recorded") / "data"
    with (
        Rollout("CartPole-v1", module=RandomModule, num_envs=3, num_fragments=3, fragment_length=32, seed=0) as rollout,
        DatasetSink(path, rollout=rollout) as sink,
    ):
        for fragment in rollout.fragments():
            sink(fragment)
    return path


def rows_of(folder: Path) -> Any:
    """All steps, in the order of their files."""
    return pa.concat_tables([pq.read_table(path) for path in sorted((folder / "data").glob("*/*.parquet"))])


def json_of(path: Path) -> Any:
    return json.loads(path.read_text())


def test_what_is_written_is_read_back_step_by_step(recorded: Path, tmp_path: Path) -> None:
    folder = tmp_path / "lerobot"
    arguments = ["--to", "lerobot", "--out", str(folder), "--fps", "50"]
    assert main(["dataset", "convert", str(recorded), *arguments]) == 0
    source = list(DatasetSource(recorded, complete_episodes=True).episodes())
    table, episodes = rows_of(folder), pq.read_table(folder / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    assert len(episodes) == len(source)
    assert table["index"].to_pylist() == list(range(sum(map(len, source))))
    for number, (episode, row) in enumerate(zip(source, episodes, strict=True)):
        assert (row["episode_index"], row["length"], row["tasks"]) == (number, len(episode), ["CartPole-v1"])
        assert row["dataset_to_index"] - row["dataset_from_index"] == len(episode)
        steps = table.slice(row["dataset_from_index"], row["length"])
        state = np.array(steps["observation.state"].to_pylist(), np.float32)
        np.testing.assert_array_equal(state, episode.get_observations()[:-1])
        np.testing.assert_array_equal(steps["action"].to_numpy(), episode.get_actions())
        np.testing.assert_array_equal(steps["next.reward"].to_numpy(), episode.get_rewards())
        np.testing.assert_allclose(steps["timestamp"].to_numpy(), np.arange(len(episode)) / 50, rtol=1e-6)
        assert steps["frame_index"].to_pylist() == list(range(len(episode)))
        assert set(steps["episode_index"].to_pylist()) == {number}
        assert steps["next.done"].to_pylist() == [False] * (len(episode) - 1) + [True]
        assert steps["next.terminated"].to_pylist()[-1] == episode.is_terminated
        np.testing.assert_allclose(row["stats/observation.state/mean"], state.mean(0, np.float64))
    assert pq.ParquetFile(folder / "data/chunk-000/file-000.parquet").num_row_groups == len(source)


def test_features_and_types_are_those_that_info_names(recorded: Path, tmp_path: Path) -> None:
    folder = tmp_path / "lerobot"
    source = DatasetSource(recorded, complete_episodes=True)
    count, steps = write_lerobot(source.episodes(), folder, task="balance", fps=30)
    info = json_of(folder / "meta/info.json")
    assert (info["codebase_version"], info["fps"], info["video_path"]) == ("v3.0", 30, None)
    assert (info["total_episodes"], info["total_frames"], info["total_tasks"]) == (count, steps, 1)
    assert info["splits"] == {"train": f"0:{count}"}
    one = {"shape": [1], "names": None}
    numbers = ("frame_index", "episode_index", "index", "task_index")
    assert info["features"] == {
        "observation.state": {"dtype": "float32", "shape": [4], "names": None},
        "action": {"dtype": "int64", **one},
        "next.reward": {"dtype": "float32", **one},
        "next.done": {"dtype": "bool", **one},
        "next.terminated": {"dtype": "bool", **one},
        "timestamp": {"dtype": "float32", **one},
        **{name: {"dtype": "int64", **one} for name in numbers},
    }
    table = rows_of(folder)
    assert table.column_names == list(info["features"])
    assert table.schema.field("observation.state").type == pa.list_(pa.float32(), 4)
    assert [table.schema.field(name).type for name in numbers] == [pa.int64()] * 4
    assert (folder / info["data_path"].format(chunk_index=0, file_index=0)).is_file()
    tasks = pd.read_parquet(folder / "meta/tasks.parquet")
    assert (list(tasks.index), tasks.index.name, tasks["task_index"].tolist()) == (["balance"], "task", [0])
    stats = json_of(folder / "meta/stats.json")
    assert stats.keys() == info["features"].keys()
    values = np.array(table["observation.state"].to_pylist())
    for name, wanted in {
        "min": values.min(0),
        "max": values.max(0),
        "mean": values.mean(0),
        "std": values.std(0),
    }.items():
        np.testing.assert_allclose(stats["observation.state"][name], wanted, rtol=1e-6)
    assert stats["observation.state"]["count"] == [steps]


def test_statistics_worked_by_hand() -> None:
    stats = FeatureStats()
    stats.add(np.array([[1.0], [3.0]]))
    stats.add(np.array([[5.0], [7.0], [9.0]]))
    # 1, 3, 5, 7, 9: the squares of what they differ from 5 by are 16, 4, 0, 4 and 16, in the mean 8.
    wanted = {"min": [1.0], "max": [9.0], "mean": [5.0], "std": [8**0.5], "count": [5]}
    assert stats.entries() == {name: pytest.approx(value) for name, value in wanted.items()}


def test_nested_spaces_have_a_feature_for_each_part(tmp_path: Path) -> None:
    played = Played(2, 6, nested=True)
    with DatasetSink(tmp_path / "data") as sink:
        for fragment in played.fragments:
            sink(fragment)
    source = DatasetSource(tmp_path / "data", complete_episodes=True)
    write_lerobot(source.episodes(), tmp_path / "lerobot", task="count", fps=10)
    parts = {f"observation.{key}" for key in source.observation_space}
    assert parts < set(json_of(tmp_path / "lerobot/meta/info.json")["features"])
    table = rows_of(tmp_path / "lerobot")
    first = next(DatasetSource(tmp_path / "data", complete_episodes=True).episodes())
    at = np.array(table["observation.at"].to_pylist())[: len(first)]
    np.testing.assert_array_equal(at, first.get_observations(slice(0, len(first)))["at"])


def episode_of(observations: Any) -> SingleAgentEpisode:
    """An episode over a row more of observations than of steps."""
    episode = SingleAgentEpisode()
    episode.add_env_reset(observations[0])
    for place, observation in enumerate(observations[1:], start=1):
        episode.add_env_step(observation, np.float32(0.5), 1.0, terminated=place == len(observations) - 1)
    return episode.to_numpy()


def test_arrays_of_several_dimensions_are_lists_of_lists(tmp_path: Path) -> None:
    pictures = np.random.default_rng(0).integers(0, 256, (5, 2, 3, 4), np.uint8)
    write_lerobot([episode_of(pictures)], tmp_path / "lerobot", task="look", fps=2.5)
    table = rows_of(tmp_path / "lerobot")
    np.testing.assert_array_equal(np.array(table["observation.state"].to_pylist(), np.uint8), pictures[:-1])
    info = json_of(tmp_path / "lerobot/meta/info.json")
    assert info["features"]["observation.state"] == {"dtype": "uint8", "shape": [2, 3, 4], "names": None}
    assert info["fps"] == 2.5


def test_many_steps_go_into_several_files_that_episodes_name(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lerobot_episodes, "_FILE_MB", 0)  # a file for each episode
    monkeypatch.setattr(lerobot_episodes, "_FILES_OF_A_CHUNK", 2)
    folder = tmp_path / "lerobot"
    count, _ = write_lerobot(DatasetSource(recorded, complete_episodes=True).episodes(), folder, task="x", fps=30)
    episodes = pq.read_table(folder / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    template = json_of(folder / "meta/info.json")["data_path"]
    for number, row in enumerate(episodes):
        place = {"chunk_index": row["data/chunk_index"], "file_index": row["data/file_index"]}
        assert place == {"chunk_index": number // 2, "file_index": number % 2}
        assert set(pq.read_table(folder / template.format(**place))["episode_index"].to_pylist()) == {number}
    assert count == len(episodes) > 3


def test_what_lerobot_can_not_hold_is_refused_and_nothing_stays(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deep = np.zeros((3, 1, 1, 1, 1, 1, 2))
    for episodes, fps, error in (
        ([episode_of(deep)], 30, r"observation.state has items of the shape \[1, 1, 1, 1, 1, 2\], expected 1 to 5"),
        ([episode_of([{"a/b": 1.0}, {"a/b": 2.0}])], 30, "observation.a/b has a '/'"),
        ([episode_of([{"a": {"b": 1.0}, "a.b": 2.0}] * 2)], 30, "two parts of a space are called observation.a.b"),
        ([], 30, "there is no episode"),
        ([], 0, "fps is 0, expected steps in a second"),
    ):
        with pytest.raises(DatasetError, match=error):
            write_lerobot(episodes, tmp_path / "new", task="x", fps=fps)
        assert not list(tmp_path.iterdir())
    with pytest.raises(DatasetError, match="is there already"):
        write_lerobot([], tmp_path, task="x", fps=30)
    for to, needed in (("lerobot", "out"), ("minari", "id")):
        assert main(["dataset", "convert", str(recorded), "--to", to]) == 1
        assert f"--to {to} needs --{needed} as well" in capsys.readouterr().err
