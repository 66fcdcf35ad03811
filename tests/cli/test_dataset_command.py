"""`rollflow dataset`: datasets are shown, checked, merged, filtered and converted."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import minari
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command_errors import Says
from numbered_agents import numbered_agents
from replayed import Played, write_dataset
from serial_module import SerialModule

from rollflow import DatasetSource, MultiAgentRollout, Rollout
from rollflow.cli.main import main


@pytest.fixture(scope="module")
def played() -> Played:
    return Played(slots=3, fragments=12, seed=5, fragment_length=8)


def write(path: Path, played: Played, **options: object) -> Path:
    """A dataset of several files."""
    write_dataset(played.fragments, path, max_file_bytes=8_000, **options)
    return path


@pytest.fixture
def path(played: Played, tmp_path: Path) -> Path:
    return write(tmp_path / "data", played)


def rewrite(file: Path, name: str, value: object, row: int | None = None) -> None:
    """Write a file anew, with another value in one row of a column, or in all; row groups stay as they are."""
    with pq.ParquetFile(file) as before:
        groups = [before.read_row_group(each) for each in range(before.num_row_groups)]
    at = groups[0].schema.get_field_index(name)
    with pq.ParquetWriter(file, groups[0].schema) as writer:
        first = 0
        for table in groups:
            there = enumerate(table.column(name).to_pylist(), first)
            values = [value if row in (None, place) else each for place, each in there]
            first += len(table)
            column = pa.array(values, table.schema.field(name).type)
            writer.write_table(table.set_column(at, table.schema.field(at), column), row_group_size=len(table))


def test_show_says_what_a_dataset_is(played: Played, tmp_path: Path, shown: Says) -> None:
    path = write(tmp_path / "data", played, metadata={"by": "us"})
    source = DatasetSource(path)
    text = shown("dataset", "show", path)
    assert f"observations  {source.observation_space}\nactions       {source.action_space}\n" in text
    episodes, steps = source.num_episodes, source.num_steps
    assert f"run 0         {episodes} episodes, {steps} steps; environment not known; by us\n" in text
    cut = sum("cut" in episode.custom_data for episode in source.episodes())
    assert f"episodes      {episodes}, {cut} without beginning or end\nsteps         {steps}\n" in text
    lengths = [len(episode) for episode in source.episodes()]
    assert f"length        mean {np.mean(lengths):.2f}, deviation {np.std(lengths):.2f}, median" in text


@pytest.mark.parametrize("all_are", [False, True])
def test_show_tells_returns_that_are_no_numbers_beside_others(all_are: bool, tmp_path: Path, shown: Says) -> None:
    with Rollout("CartPole-v1", fragment_length=128, num_fragments=1, seed=0) as rollout:
        write_dataset(rollout.fragments(), tmp_path / "data")
    [steps] = (tmp_path / "data" / "steps").iterdir()
    rewrite(steps, "rewards", math.nan, None if all_are else 4)
    returns = DatasetSource(tmp_path / "data").summary().returns
    text = shown("dataset", "show", tmp_path / "data")
    if all_are:
        assert f"return        all {len(returns)} are NaN or infinite\n" in text
    else:
        assert f"return        mean {np.nanmean(returns):.2f}, " in text
        assert f" of {len(returns) - 1}; NaN or infinite: 1\n" in text


def test_check_finds_nothing_in_whole_files(path: Path, shown: Says) -> None:
    printed = shown("dataset", "check", path).splitlines()
    files = sorted((path / "steps").glob("*.parquet"))
    assert printed == [*(f"ok     {file}" for file in files), "all is well"]


def test_check_names_counts_that_differ(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite(path / "episodes" / "000002.parquet", "num_steps", 77, 1)
    assert main(["dataset", "check", str(path)]) == 1
    wrong = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("ok ")]
    assert wrong[0] == f"WRONG  {path}/steps/000002.parquet"
    assert "its row groups have" in wrong[1]
    assert wrong[2:] == ["1 wrong"]


def test_check_names_a_flipped_bit_and_goes_on(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = path / "steps" / "000001.parquet"
    data = bytearray(file.read_bytes())
    column = pq.ParquetFile(file).metadata.row_group(0).column(3)
    data[column.data_page_offset + column.total_compressed_size - 3] ^= 1
    file.write_bytes(data)
    (path / "episodes" / "000002.parquet").write_bytes(b"")
    assert main(["dataset", "check", str(path)]) == 1
    printed = capsys.readouterr().out
    assert f"{file} can't be read" in printed
    assert f"{path}/episodes/000002.parquet can't be read" in printed
    assert f"ok     {path}/steps/000003.parquet" in printed
    assert printed.endswith("2 wrong\n")


def test_merge_keeps_episodes_and_runs_apart(
    played: Played, tmp_path: Path, capsys: pytest.CaptureFixture[str], refused: Says, shown: Says
) -> None:
    one, other = (write(tmp_path / name, played, metadata={"name": name}) for name in ("one", "other"))
    assert main(["dataset", "merge", str(one), str(other), "--out", str(tmp_path / "both")]) == 0
    both = DatasetSource(tmp_path / "both")
    assert f"{both.num_episodes} episodes more, of {both.num_steps} steps" in capsys.readouterr().out
    assert [run["metadata"]["name"] for run in both.description["runs"]] == ["one", "other"]
    found = [(each.id_, len(each), each.custom_data) for each in both.episodes()]
    assert found == [
        (each.id_, len(each), each.custom_data) for path in (one, other) for each in DatasetSource(path).episodes()
    ]
    assert main(["dataset", "check", str(tmp_path / "both")]) == 0
    text = shown("dataset", "merge", one, "--out", tmp_path / "both")
    assert f"; {DatasetSource(tmp_path / 'both').num_episodes} in all" in text
    assert "is read as well, expected another folder" in refused(
        "dataset", "merge", one, "--out", tmp_path / "other" / ".." / "one"
    )


def test_a_merge_that_fails_leaves_nothing_or_says_what_is_left(played: Played, tmp_path: Path, refused: Says) -> None:
    one, other = write(tmp_path / "one", played), write(tmp_path / "other", played)
    last = sorted((other / "steps").glob("*.parquet"))[-1]
    data, footer = last.read_bytes(), pq.read_metadata(last).serialized_size + 8
    last.write_bytes(data[:8] + bytes(len(data) - 8 - footer) + data[-footer:])
    new, old = tmp_path / "new", write(tmp_path / "old", played)
    before = DatasetSource(old).num_steps
    assert main(["dataset", "merge", str(one), "--out", str(new)]) == 0
    shutil.rmtree(new)
    for out in (new, old):
        error = refused("dataset", "merge", one, other, "--out", out)
        assert str(last) in error
    assert not new.exists()
    assert not list(tmp_path.glob(".*"))
    more = DatasetSource(old).num_steps - before
    assert more >= DatasetSource(one).num_steps
    assert f"{old} has {more} steps more, but not all: " in error


def test_merge_refuses_datasets_of_several_kinds_at_once(played: Played, tmp_path: Path, refused: Says) -> None:
    one, other = write(tmp_path / "one", played), write(tmp_path / "other", played, extra=())
    error = refused("dataset", "merge", one, one, other, "--out", tmp_path / "both")
    assert f"{other} does not go with {one}: the columns [" in error
    assert "expected datasets of one kind" in error
    assert not (tmp_path / "both").exists()


def test_filter_keeps_the_episodes_within_the_bounds(played: Played, path: Path, tmp_path: Path, refused: Says) -> None:
    write(path, played)
    everything = [(each.get_return(), len(each), "cut" in each.custom_data) for each in DatasetSource(path).episodes()]
    median = float(np.median([returns for returns, *_ in everything]))
    bounds = ["--min-return", str(median), "--max-length", "9", "--run", "1", "--whole", "--min-version", "0"]
    assert main(["dataset", "filter", str(path), "--out", str(tmp_path / "few"), *bounds]) == 0
    few = [
        (each.get_return(), len(each), "cut" in each.custom_data) for each in DatasetSource(tmp_path / "few").episodes()
    ]
    second = everything[len(everything) // 2 :]
    assert few == [each for each in second if each[0] >= median and each[1] <= 9 and not each[2]] != []
    nothing = ["--min-version", "1", "--out", str(tmp_path / "none")]
    assert f"none of {len(everything)} episodes of {path} is within the bounds" in refused(
        "dataset", "filter", path, *nothing
    )
    for bounds, told in (
        (["--min-return", "nan"], "a bound of returns is NaN"),
        (["--run", "2"], f"there is no run 2 in {path}, expected 0 to 1"),
    ):
        assert told in refused("dataset", "filter", path, *bounds, "--out", tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_datasets_of_several_agents_are_shown_checked_filtered_and_merged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], refused: Says, shown: Says
) -> None:
    _, makers = numbered_agents(2, agents=2, nested=1, length=6)
    data, good, both = (str(tmp_path / name) for name in ("data", "good", "both"))
    modules = {name: SerialModule() for name in ("nested", "plain")}
    mapping = {"agent 0": "nested", "agent 1": "plain"}
    played: dict[str, Any] = {"fragment_length": 8, "num_fragments": 3, "seed": 0}
    with MultiAgentRollout(makers, module=modules, agent_to_module_mapping_fn=mapping, **played) as rollout:
        write_dataset(rollout.fragments(), data, max_file_bytes=1, rollout=rollout)
    source = DatasetSource(data)
    summary = source.summary()
    text = shown("dataset", "show", data)
    assert "agents        agent 0, agent 1\nmodule        nested\nobservations  Dict(" in text
    assert f"steps         {source.num_steps}\n" in text
    assert shown("dataset", "check", data).endswith("env_episodes/000003.parquet\nall is well\n")
    assert main(["dataset", "filter", data, "--whole", "--out", good]) == 0
    whole = DatasetSource(good)
    assert whole.num_episodes == np.count_nonzero(summary.is_whole) < source.num_episodes
    returns = [sum(float(np.sum(each.get_rewards())) for each in episode.agent_episodes.values())
               for episode in whole.episodes()]  # fmt: skip
    assert returns == pytest.approx(summary.returns[summary.is_whole])
    assert main(["dataset", "merge", data, good, "--out", both]) == 0
    assert DatasetSource(both).num_steps == source.num_steps + whole.num_steps
    assert [each["rollout"]["seed"] for each in DatasetSource(both).description["runs"]] == [0, 0]
    options = ["--to", "minari", "--id", "numbered/play-v3", "--out", str(tmp_path / "other")]
    assert f"{data} is of several agents, expected one" in refused("dataset", "convert", data, *options)
    assert not (tmp_path / "other").exists()
    rewrite(tmp_path / "data/env_episodes/000001.parquet", "agent_steps", 99, 0)
    assert main(["dataset", "check", data]) == 1
    assert "steps of agents, env_episodes says" in capsys.readouterr().out


def test_convert_writes_what_minari_opens(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], refused: Says
) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "all"))
    command = ["dataset", "convert", str(path), "--to", "minari", "--id", "numbered/play-v3", "--out"]
    assert main([*command, str(tmp_path / "all")]) == 0
    dataset = minari.load_dataset("numbered/play-v3")
    source = DatasetSource(path)
    assert (dataset.total_episodes, dataset.total_steps) == (source.num_episodes, source.num_steps)
    assert f"has {source.num_episodes} episodes, {source.num_steps} steps" in capsys.readouterr().out
    assert main(["dataset", "filter", str(tmp_path / "all/numbered/play-v3"), "--out", str(tmp_path / "back")]) == 0
    assert DatasetSource(tmp_path / "back").num_steps == source.num_steps
    metadata = json.loads((tmp_path / "back/dataset.json").read_text())["runs"][0]["metadata"]
    assert metadata["dataset_id"] == "numbered/play-v3"
    assert "is Minari's, expected a dataset of rollflow's own" in refused(
        "dataset", "check", tmp_path / "all/numbered/play-v3"
    )
