"""A sink that is killed leaves whole files; the next one adds to them."""

import signal
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from killed_sinks import held_writes, write_and_be_killed
from replayed import Played, write_dataset
from replayed_agents import TURNS, fragments_of
from stored_steps import env_steps_of, steps_in

from rollflow import DatasetSink, DatasetSource, MultiAgentEpisode
from rollflow.stream import DatasetError

FRAGMENTS: dict[str, Any] = {
    "one": lambda: Played(slots=3, fragments=40, seed=1, lengths=(1, 12), nested=True).fragments,
    "several": lambda: fragments_of(TURNS, 8),
}


@pytest.fixture(scope="module", params=FRAGMENTS)
def fragments(request: pytest.FixtureRequest) -> Any:
    """Fragments of one agent or of several."""
    return FRAGMENTS[request.param]()


def runs_of(path: Path, fragments: Any) -> list[int]:
    """How many of the fragments, from the first on, stand in each run, where no others stand."""
    source, counts = DatasetSource(path), list[int]()
    sizes = np.cumsum([0, *map(env_steps_of, fragments)]).tolist()
    for run in range(len(source.description["runs"])):
        steps = int(source._store.num_steps[source._store.runs == run].sum())
        assert steps in sizes, f"run {run} has {steps} steps, which is no whole number of fragments"
        counts.append(sizes.index(steps))
    expected = sum((steps_in(fragments[:count]) for count in counts), Counter())
    assert steps_in(list(source.fragments())) == expected
    return counts


@pytest.mark.parametrize("max_file_bytes", [1, pytest.param(20_000, marks=pytest.mark.slow)])
def test_what_was_committed_is_whole_after_kills_and_the_next_sink_adds_to_it(
    fragments: Any, tmp_path: Path, max_file_bytes: int
) -> None:
    generator, counts = np.random.default_rng(max_file_bytes), [1]
    write_dataset(fragments[:1], tmp_path, max_file_bytes=1)
    for _ in range(3):
        write_and_be_killed(fragments, tmp_path, max_file_bytes, int(generator.integers(1, len(fragments))))
        now = runs_of(tmp_path, fragments)
        assert now[: len(counts)] == counts  # what was there stays as it is
        counts = now
    write_dataset(fragments, tmp_path, max_file_bytes=max_file_bytes)
    assert runs_of(tmp_path, fragments) == [*counts, len(fragments)]
    left = [each.name for each in tmp_path.rglob("*") if each.is_file() and each.name.startswith(".")]
    assert left == [".lock"]


LONG: dict[str, Any] = {
    "one": lambda: Played(slots=1, fragments=3, lengths=(30, 30)).fragments,
    "several": lambda: fragments_of(TURNS._replace(envs=1, length=30, fragment_length=3, at_once=True), 3),
}


@pytest.mark.parametrize("agents", LONG)
def test_a_missing_fragment_in_between_ends_its_episodes(tmp_path: Path, agents: str) -> None:
    fragments = LONG[agents]()
    write_dataset([fragments[0], fragments[2]], tmp_path)
    episodes: list[Any] = list(DatasetSource(tmp_path).episodes())
    assert steps_in(list(DatasetSource(tmp_path).fragments())) == steps_in([fragments[0], fragments[2]])
    several = [each for each in episodes if isinstance(each, MultiAgentEpisode)]
    starts = [each.env_t_started if each in several else each.t_started for each in episodes]
    assert any(starts)
    assert all(start or each.is_done for start, each in zip(starts, episodes, strict=True))
    assert all(agent.is_done for each in several for agent in each.agent_episodes.values())
    assert any("cut" in each.custom_data for each in episodes)


def test_one_sink_that_is_flushed_in_between_goes_on_with_its_episodes(fragments: Any, tmp_path: Path) -> None:
    with DatasetSink(tmp_path) as sink:
        for fragment in fragments:
            sink(fragment)
            sink.flush()
    assert runs_of(tmp_path, fragments) == [len(fragments)]
    with pytest.raises(DatasetError, match=f"the sink to {tmp_path} is closed, expected a new one"):
        sink(fragments[0])


def test_files_that_were_never_committed_are_passed_over_and_removed(fragments: Any, tmp_path: Path) -> None:
    write_dataset(fragments[:2], tmp_path, max_file_bytes=1)
    several = (tmp_path / "modules").exists()
    last = tmp_path / ("env_episodes" if several else "steps")
    (last / "000002.parquet").unlink()  # which is renamed behind all others
    left = [last / ".000003.parquet.part", tmp_path / ".dataset.json.part"]
    for path in left:
        path.write_bytes(b"a part")
    assert runs_of(tmp_path, fragments) == [1]
    write_dataset(fragments[:1], tmp_path)
    assert runs_of(tmp_path, fragments) == [1, 1]
    assert not any(path.exists() for path in left)
    assert {each.name for each in tmp_path.rglob("*.parquet")} == {"000001.parquet", "000002.parquet"}
    if several:
        next((tmp_path / "modules").glob("*/steps/000002.parquet")).unlink()
        with pytest.raises(DatasetError, match=r"steps of agents, env_episodes says|is missing"):
            DatasetSource(tmp_path)


def test_two_sinks_on_one_folder_are_refused(fragments: Any, tmp_path: Path) -> None:
    with DatasetSink(tmp_path) as sink:
        with pytest.raises(DatasetError, match=f"another sink writes to {tmp_path}, expected one at a time"):
            DatasetSink(tmp_path)
        sink(fragments[0])
    write_dataset([fragments[0]], tmp_path)
    assert len(runs_of(tmp_path, fragments)) == 2


def test_a_sink_whose_end_was_broken_off_is_ended_by_the_next_call(
    fragments: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = held_writes(monkeypatch)
    sink = DatasetSink(tmp_path)
    sink(fragments[0])
    with monkeypatch.context() as patched:  # as Ctrl-C does while the thread writes
        patched.setattr(ThreadPoolExecutor, "shutdown", lambda self: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            sink.close()
    with pytest.raises(DatasetError, match="is closed, expected a new one"):
        sink(fragments[1])
    with pytest.raises(DatasetError, match="another sink writes to"):
        DatasetSink(tmp_path)
    may_write.set()
    sink.close()
    assert sink.num_steps == fragments[0].num_steps
    write_dataset([fragments[0]], tmp_path)
    assert len(runs_of(tmp_path, fragments)) == 2


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


def test_a_sink_that_is_closed_says_nothing(fragments: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sink = write_dataset([fragments[0]], tmp_path)
    del sink
    assert caplog.text == ""
