"""Runs of a dataset: what has a number of its own, what is written from another dataset, and when a sink is open."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from replayed import Played, write_dataset
from stored_steps import steps_in

from rollflow import DatasetSink, DatasetSource, Rollout
from rollflow.stream import DatasetError


def rollout(seed: int = 0, env: str = "CartPole-v1", fragments: int = 2) -> Rollout:
    return Rollout(env, num_envs=2, fragment_length=16, num_fragments=fragments, seed=seed)


def write(path: Path, *rollouts: Rollout, complete: bool = False, **options: Any) -> None:
    """Write the fragments of rollouts to one sink, a fragment of each in turn."""
    with DatasetSink(path, **options) as sink:
        made = [each.__enter__().fragments(complete_episodes=complete) for each in rollouts]
        for fragments in zip(*made, strict=True):
            for fragment in fragments:
                sink(fragment)
        for each in rollouts:
            each.close()


@pytest.mark.parametrize("complete", [False, True])
def test_two_rollouts_of_one_seed_are_two_runs_of_one_sink(tmp_path: Path, complete: bool) -> None:
    first = rollout(fragments=4)
    write(tmp_path, first, rollout(fragments=4), complete=complete, rollout=first)
    source = DatasetSource(tmp_path)
    assert [run["rollout"] is None for run in source.description["runs"]] == [False, True]
    rows = pq.read_table(tmp_path / "episodes").select(["run", "eps_id", "t_started"]).to_pylist()
    by_run = [sorted((row["eps_id"], row["t_started"]) for row in rows if row["run"] == run) for run in (0, 1)]
    assert by_run[0] == by_run[1] != []
    assert len({(row["run"], row["eps_id"], row["t_started"]) for row in rows}) == len(rows)


def test_runs_that_are_written_from_a_source_stay_runs_with_their_records(tmp_path: Path) -> None:
    fragments, path, other = Played(slots=2, fragments=6).fragments, tmp_path / "data", tmp_path / "other"
    for _ in range(2):
        write_dataset(fragments, path, metadata={"by": "us"})
    write_dataset(DatasetSource(path, batch_size=7, shuffle_seed=0).fragments(), other, metadata={"copied": True})
    before, after = DatasetSource(path), DatasetSource(other)
    assert [run["metadata"] for run in after.description["runs"]] == [{"by": "us", "copied": True}] * 2
    ids = [
        sorted((int(run), each.id_) for run, each in zip(source._store.runs, source.episodes(), strict=True))
        for source in (before, after)
    ]
    assert ids[0] == ids[1]
    assert steps_in(list(after.fragments())) == steps_in([*fragments, *fragments])


def test_another_environment_with_the_same_spaces_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for env in ("CartPole-v1", "CartPole-v1", "CartPole-v0"):
        one = rollout(env=env)
        write(tmp_path, one, rollout=one)
        expected = "expected one environment" if env == "CartPole-v0" else ""
        assert caplog.text.strip().endswith(expected)
        assert bool(caplog.text) == bool(expected)
    assert f"{tmp_path} has steps of CartPole-v1 and of CartPole-v0" in caplog.text


def test_a_bad_folder_is_refused_when_the_sink_is_made(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(DatasetError, match=f"{file} is a file, expected a dataset, which is a folder"):
        DatasetSink(file)
    with pytest.raises(DatasetError, match=f"a dataset can't be written to {file}/below"):
        DatasetSink(file / "below")
    with pytest.raises(DatasetError, match=f"{file} is a file, expected the folder of a dataset"):
        DatasetSource(file)
    with pytest.raises(DatasetError, match="there is no dataset at"):
        DatasetSource(file / "below")


def test_a_sink_without_a_step_leaves_a_dataset_without_steps(tmp_path: Path) -> None:
    with DatasetSink(tmp_path / "data"):
        pass
    with pytest.raises(DatasetError, match=f"the dataset at {tmp_path}/data has no steps yet"):
        DatasetSource(tmp_path / "data")
    write(tmp_path / "data", rollout())
    assert DatasetSource(tmp_path / "data").num_steps > 0


def test_a_sink_that_nobody_has_any_more_lets_others_write(tmp_path: Path) -> None:
    sink = DatasetSink(tmp_path)
    del sink
    DatasetSink(tmp_path).close()


def test_what_can_be_no_module_or_state_is_refused_at_once(tmp_path: Path) -> None:
    write(tmp_path, rollout())
    with pytest.raises(ValueError, match="module is 3, expected a module"):
        DatasetSource(tmp_path, module=3)
    with pytest.raises(ValueError, match="learner_connector is 3, expected a function"):
        DatasetSource(tmp_path, learner_connector=3)  # type: ignore[arg-type]
    for state in ({}, {"files": [1]}, 3):
        with pytest.raises(DatasetError, match=r"the state is .*, expected what state_dict\(\) has given"):
            DatasetSource(tmp_path).load_state_dict(state)  # type: ignore[arg-type]
