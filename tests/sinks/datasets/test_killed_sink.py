"""A sink that is killed leaves whole files; the next one adds to them."""

import signal
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from killed_sinks import write_and_be_killed
from replayed import Played, numbers_of, write_dataset

from rollflow import DatasetSink, DatasetSource
from rollflow.sinks.datasets.dataset_sink import FileSet
from rollflow.stream import DatasetError


@pytest.fixture(scope="module")
def played() -> Played:
    return Played(slots=3, fragments=40, seed=1, lengths=(1, 12), nested=True)


def check(path: Path, played: Played) -> list[int]:
    """Hold every episode that is read against the logs; returns the number of steps of each run."""
    source = DatasetSource(path)
    starts = np.cumsum([0, *(fragment.num_steps for fragment in played.fragments)]).tolist()
    found: list[set[tuple[int, int, int]]] = [set()]
    counts: Counter[int] = Counter()
    for run, episode in zip(source._store.runs.tolist(), source.episodes(), strict=True):
        observations = numbers_of(episode.get_observations())
        slot, number = observations[0, :2].tolist()
        steps = [(slot, number, step) for step in range(len(episode))]
        assert observations.tolist() == [*map(list, steps), [slot, number, len(episode)]]
        made = [played.steps[step] for step in steps]
        assert [action for action, *_ in made] == episode.get_actions().tolist()
        assert [reward for _, reward, *_ in made] == episode.get_rewards().tolist()
        assert episode.is_done
        counts[run] += len(steps)
        while len(found) <= run:
            found.append(set())
        assert found[run].isdisjoint(steps)
        found[run].update(steps)
    for run, steps in enumerate(found):
        assert counts[run] in starts, f"run {run} has {counts[run]} steps, which is no whole number of fragments"
        assert len(steps) == counts[run]
    return [counts[run] for run in range(len(source.description["runs"]))]


@pytest.mark.slow
@pytest.mark.parametrize("max_file_bytes", [1, 20_000])
def test_every_episode_that_was_committed_is_there_once_after_kills(
    played: Played, tmp_path: Path, max_file_bytes: int
) -> None:
    path = tmp_path / "data"
    generator = np.random.default_rng(max_file_bytes)
    write_dataset([played.fragments[0]], path, max_file_bytes=1)
    counts = [played.fragments[0].num_steps]
    for _ in range(6):
        write_and_be_killed(played.fragments, path, max_file_bytes, int(generator.integers(1, len(played.fragments))))
        now = check(path, played)
        assert now[: len(counts)] == counts  # what was there stays as it is
        counts = now
    write_dataset(played.fragments, path, max_file_bytes=max_file_bytes)
    everything = sum(fragment.num_steps for fragment in played.fragments)
    assert check(path, played) == [*counts, everything]
    left = [each.name for each in path.rglob("*") if each.is_file() and each.name.startswith(".")]
    assert left == [".lock"]


def test_an_episode_whose_beginning_was_not_written_says_where_it_begins(played: Played, tmp_path: Path) -> None:
    write_dataset(played.fragments[3:5], tmp_path)
    starts = {each.id_: each.t_started for each in DatasetSource(tmp_path).episodes()}
    expected = {each.id_: each.t_started for each in reversed(played.fragments[3].episodes()[:])}
    assert any(expected.values())
    assert {id_: starts[id_] for id_ in expected} == expected


def test_a_missing_fragment_in_between_ends_its_episodes(tmp_path: Path) -> None:
    long = Played(slots=1, fragments=3, lengths=(30, 30))
    with DatasetSink(tmp_path) as sink:
        sink(long.fragments[0])
        sink(long.fragments[2])
    first, second = DatasetSource(tmp_path).episodes()
    assert first.id_ == second.id_
    assert (first.t_started, first.t, second.t_started) == (0, 4, second.t - len(second))
    assert "cut" in first.custom_data


def test_one_sink_that_is_flushed_in_between_goes_on_with_its_episodes(played: Played, tmp_path: Path) -> None:
    with DatasetSink(tmp_path) as sink:
        for fragment in played.fragments:
            sink(fragment)
            sink.flush()
    assert check(tmp_path, played) == [sum(fragment.num_steps for fragment in played.fragments)]
    with pytest.raises(DatasetError, match=f"the sink to {tmp_path} is closed, expected a new one"):
        sink(played.fragments[0])


def test_files_that_were_never_committed_are_passed_over_and_removed(played: Played, tmp_path: Path) -> None:
    write_dataset([played.fragments[0]], tmp_path)
    whole = (tmp_path / "episodes/000001.parquet").read_bytes()
    left = [
        tmp_path / "steps/.000002.parquet.part",
        tmp_path / "episodes/.000002.parquet.part",
        tmp_path / "episodes/000003.parquet",  # renamed before its file of steps
        tmp_path / ".dataset.json.part",
    ]
    for path in left:
        path.write_bytes(whole)
    assert DatasetSource(tmp_path).num_steps == played.fragments[0].num_steps
    write_dataset([played.fragments[0]], tmp_path)
    assert not any(path.exists() for path in left)
    assert check(tmp_path, played) == [played.fragments[0].num_steps] * 2


def test_two_sinks_on_one_folder_are_refused(played: Played, tmp_path: Path) -> None:
    with DatasetSink(tmp_path) as sink:
        with pytest.raises(DatasetError, match=f"another sink writes to {tmp_path}, expected one at a time"):
            DatasetSink(tmp_path)
        sink(played.fragments[0])
    write_dataset([played.fragments[0]], tmp_path)
    assert len(check(tmp_path, played)) == 2


def test_a_sink_whose_end_was_broken_off_is_ended_by_the_next_call(
    played: Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, write = threading.Event(), FileSet.write

    def held_back(*args: Any) -> None:
        assert may_write.wait(30)
        write(*args)

    monkeypatch.setattr(FileSet, "write", held_back)
    sink = DatasetSink(tmp_path)
    sink(played.fragments[0])
    with monkeypatch.context() as patched:  # as Ctrl-C does while the thread writes
        patched.setattr(ThreadPoolExecutor, "shutdown", lambda self: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            sink.close()
    with pytest.raises(DatasetError, match="is closed, expected a new one"):
        sink(played.fragments[1])
    with pytest.raises(DatasetError, match="another sink writes to"):
        DatasetSink(tmp_path)
    may_write.set()
    sink.close()
    assert sink.num_steps == played.fragments[0].num_steps
    write_dataset([played.fragments[0]], tmp_path)
    assert len(check(tmp_path, played)) == 2


NEVER_CLOSED = """
import sys
from rollflow import Rollout
from rollflow import DatasetSink

sink = DatasetSink(sys.argv[1])
with Rollout("CartPole-v1", num_envs=2, fragment_length=16, num_fragments=3, seed=0) as rollout:
    for number, fragment in enumerate(rollout.fragments()):
        sink(fragment)
        if number == 0:
            sink.flush()
    print(rollout.environments.num_steps, sink.num_steps)
"""


@pytest.mark.slow
def test_a_sink_that_is_never_closed_says_how_many_steps_are_lost(tmp_path: Path) -> None:
    command = [sys.executable, "-c", NEVER_CLOSED, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    made, committed = map(int, ended.stdout.split())
    assert 0 < committed < made
    lost = f"{made - committed} steps that were handed over are not in the dataset"
    assert f"a DatasetSink to {tmp_path} was not closed: {lost}" in ended.stderr
    assert DatasetSource(tmp_path).num_steps == committed


def test_a_sink_that_is_closed_says_nothing(played: Played, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sink = write_dataset([played.fragments[0]], tmp_path)
    del sink
    assert caplog.text == ""
