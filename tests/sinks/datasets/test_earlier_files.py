"""Datasets of earlier versions, whose columns may have nulls and have no deltas; and paths that two columns share."""

import shutil
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pyarrow.parquet as pq
import pytest
from replayed import Played

from rollflow import DatasetSink, DatasetSource, Rollout
from rollflow.cli.main import main
from rollflow.nodes import RandomModule

EARLIER = Path(__file__).parent / "before_deltas"  # numbered environments, two fragments, a file each


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EARLIER, tmp_path / "data"))


def rows_of(path: Path) -> list[Any]:
    return sorted(tuple(row) for row in pq.read_table(path / "steps").column("obs").to_pylist())


def read(path: Path) -> list[Any]:
    return sorted(tuple(row) for batch in DatasetSource(path).batches() for row in batch["obs"].tolist())


def test_an_earlier_dataset_is_read_checked_and_added_to(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = rows_of(path)
    assert before
    assert read(path) == before
    assert main(["dataset", "check", str(path)]) == 0
    played = Played(slots=2, fragments=4, seed=6, fragment_length=8)
    with DatasetSink(path) as sink:
        for fragment in played.fragments:
            sink(fragment)
    assert len(read(path)) == len(before) + sum(fragment.num_steps for fragment in played.fragments)
    assert main(["dataset", "check", str(path)]) == 0
    merged = path.parent / "merged"
    assert main(["dataset", "merge", str(path), "--out", str(merged)]) == 0
    assert read(merged) == read(path)


def test_a_file_says_that_there_are_no_nulls_and_has_whole_numbers_as_deltas(tmp_path: Path) -> None:
    with DatasetSink(tmp_path) as sink:
        sink(Played(slots=2, fragments=1).fragments[0])
    [name] = (tmp_path / "steps").glob("*.parquet")
    file = pq.ParquetFile(name)
    assert not any(field.nullable for field in file.schema_arrow)
    group = file.metadata.row_group(0)
    encodings = {each.path_in_schema: each.encodings for each in map(group.column, range(group.num_columns))}
    assert {path for path, of in encodings.items() if "DELTA_BINARY_PACKED" in of} == {
        *("run", "t", "obs.list.element", "actions", "policy_version", "seen.list.element")
    }


class Dotted(gym.Env[Any, Any]):
    """Has parts whose paths in a Parquet file are those of others."""

    whole, real = gym.spaces.Discrete(5), gym.spaces.Box(-1, 1, (), np.float32)
    observation_space = gym.spaces.Dict(
        {
            "a": gym.spaces.Dict({"b": whole, "c": whole}),
            "a.b": real,
            "x": gym.spaces.Box(0, 9, (2,), np.int64),
            "x.list": gym.spaces.Dict({"element": real}),
        }
    )
    action_space = gym.spaces.Discrete(2)

    def reset(self, **kwargs: Any) -> Any:
        super().reset(seed=kwargs.get("seed"))
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        return self.observation_space.sample(), 1.0, False, False, {}


def test_parts_that_share_a_path_are_written_and_read(tmp_path: Path) -> None:
    with Rollout(Dotted, module=RandomModule, fragment_length=16, num_fragments=1, seed=0) as rollout:
        [fragment] = rollout.fragments()
    with DatasetSink(tmp_path) as sink:
        sink(fragment)
    [again] = DatasetSource(tmp_path).fragments()
    for name in ("a", "a.b", "x", "x.list"):
        one, other = fragment.gather("obs")[name], again.gather("obs")[name]
        np.testing.assert_equal(one, other)
