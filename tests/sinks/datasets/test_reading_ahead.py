"""The next window of a dataset is read while the fragments of one are handed out."""

import threading
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from replayed import Played

from rollflow.sinks import DatasetSink, DatasetSource
from rollflow.sinks.datasets.parquet_episodes import ParquetEpisodes
from rollflow.stream import DatasetError

IN_TIME_S = 60.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with DatasetSink(tmp_path, max_file_s=0) as sink:  # a file for each fragment
        for fragment in Played(slots=3, fragments=12, seed=5, fragment_length=8).fragments:
            sink(fragment)
    return tmp_path


def readers() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("rollflow-dataset")]


def test_a_thread_reads_the_next_window_before_it_is_asked_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, counts = ParquetEpisodes.read, [threading.Event() for _ in range(3)]
    calls = iter(counts)

    def counted(*args: Any, **options: Any) -> Any:
        steps = read(*args, **options)
        next(calls).set()
        return steps

    monkeypatch.setattr(ParquetEpisodes, "read", counted)
    fragments = DatasetSource(path, batch_size=5, window_steps=20).fragments()
    next(fragments)
    assert counts[1].wait(IN_TIME_S)
    assert not counts[2].is_set()  # no further than that
    fragments.close()


def test_a_loop_that_is_left_leaves_no_thread(path: Path) -> None:
    fragments = DatasetSource(path, batch_size=5, window_steps=20).fragments()
    next(fragments)
    (thread,) = readers()
    fragments.close()
    thread.join(IN_TIME_S)
    assert readers() == []


def test_what_comes_before_a_damaged_file_is_handed_out(path: Path) -> None:
    whole = [fragment.num_steps for fragment in DatasetSource(path, batch_size=5, window_steps=20).fragments()]
    file = sorted((path / "steps").glob("*.parquet"))[-1]
    group, data = pq.ParquetFile(file).metadata.row_group(0), bytearray(file.read_bytes())
    obs = next(each for each in map(group.column, range(group.num_columns)) if each.path_in_schema.startswith("obs"))
    data[obs.data_page_offset : obs.data_page_offset + obs.total_compressed_size] = bytes(obs.total_compressed_size)
    file.write_bytes(data)
    handed_out: list[int] = []
    source = DatasetSource(path, batch_size=5, window_steps=20)
    with pytest.raises(DatasetError, match=file.name):
        handed_out.extend(fragment.num_steps for fragment in source.fragments())
    assert len(handed_out) > 3
    assert handed_out == whole[: len(handed_out)]


def test_what_is_read_of_one_fragment_is_the_readers_own(path: Path) -> None:
    first, second = list(DatasetSource(path, batch_size=5).fragments())[:2]
    before = first.gather("obs").tolist(), second.column("obs").tolist()
    first.gather("obs")[:] = 0
    assert (first.gather("obs").tolist(), second.column("obs").tolist()) == before
    with pytest.raises(ValueError, match="read-only"):
        first.column("obs")[:] = 0
