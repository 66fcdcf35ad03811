"""The next window of a dataset is read while the fragments of one are handed out."""

import threading
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from replayed import Played, write_dataset

from rollflow import DatasetSource, Graph
from rollflow.sinks.datasets.episode_block import check_wanted, in_pairs
from rollflow.sinks.datasets.parquet_episodes import ParquetEpisodes
from rollflow.stream import ColumnError, DatasetError

IN_TIME_S = 60.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    fragments = Played(slots=3, fragments=12, seed=5, fragment_length=8).fragments
    write_dataset(fragments, tmp_path, max_file_s=0)  # a file for each of them
    return tmp_path


def readers() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("rollflow-dataset")]


def source_of(path: Path, **options: Any) -> DatasetSource:
    return DatasetSource(path, batch_size=5, window_steps=20, **options)


class Held:
    """Holds every read of a window but the first one, at its first part, until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.is_over: list[bool] = []
        read, calls = ParquetEpisodes.read, count()

        def held(*args: Any, **options: Any) -> Any:
            if next(calls):
                self.begun.set()
                while not self.go_on.wait(1e-3):
                    check_wanted()
            steps = read(*args, **options)
            self.is_over.append(True)
            return steps

        monkeypatch.setattr(ParquetEpisodes, "read", held)


def test_a_thread_reads_the_next_window_before_it_is_asked_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, counts = ParquetEpisodes.read, [threading.Event() for _ in range(3)]
    calls = iter(counts)

    def counted(*args: Any, **options: Any) -> Any:
        steps = read(*args, **options)
        next(calls).set()
        return steps

    monkeypatch.setattr(ParquetEpisodes, "read", counted)
    fragments = source_of(path).fragments()
    next(fragments)
    assert counts[1].wait(IN_TIME_S)
    assert not counts[2].is_set()  # no further than that
    fragments.close()


def test_a_loop_that_is_left_reads_no_further_and_leaves_no_thread(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    fragments = source_of(path).fragments()
    next(fragments)
    assert held.begun.wait(IN_TIME_S)
    assert len(readers()) == 1
    fragments.close()
    assert readers() == []
    assert held.is_over == [True]  # the first window's alone


@pytest.mark.anyio
async def test_a_graph_that_fails_leaves_no_thread(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, graph = Held(monkeypatch), Graph()

    def fail(fragment: Any) -> None:
        assert held.begun.wait(IN_TIME_S)
        raise ValueError("of the reader")

    graph.add(source=source_of(path), reader=fail)
    graph.connect("source.fragments", "reader")
    with pytest.raises(ValueError, match="of the reader"):
        async with graph.run() as run:
            await run.wait()
    assert readers() == []


def test_what_comes_before_a_damaged_file_is_handed_out(path: Path) -> None:
    whole = [fragment.num_steps for fragment in source_of(path).fragments()]
    file = sorted((path / "steps").glob("*.parquet"))[-1]
    group, data = pq.ParquetFile(file).metadata.row_group(0), bytearray(file.read_bytes())
    obs = next(each for each in map(group.column, range(group.num_columns)) if each.path_in_schema.startswith("obs"))
    data[obs.data_page_offset : obs.data_page_offset + obs.total_compressed_size] = bytes(obs.total_compressed_size)
    file.write_bytes(data)
    handed_out: list[int] = []
    with pytest.raises(DatasetError, match=file.name):
        handed_out.extend(fragment.num_steps for fragment in source_of(path).fragments())
    assert len(handed_out) > 3
    assert handed_out == whole[: len(handed_out)]


def test_what_is_read_of_one_fragment_is_the_readers_own(path: Path) -> None:
    first, second = list(source_of(path).fragments())[:2]
    before = first.gather("obs").tolist(), second.column("obs").tolist()
    first.gather("obs")[:] = 0
    assert (first.gather("obs").tolist(), second.column("obs").tolist()) == before
    with pytest.raises(ValueError, match="read-only"):
        first.column("obs")[:] = 0
    assert first.columns["obs"] is first.columns.get("obs") is dict(first.columns)["obs"]
    assert first.columns.get("missing") is None
    with pytest.raises(ColumnError, match="missing"):
        first.gather("missing")


def test_few_episodes_of_a_row_group_let_the_rest_of_it_go(path: Path) -> None:
    store: Any = DatasetSource(path)._store
    whole = store.read(np.arange(len(store.num_steps)), ["rewards"], with_last=False)
    few = store.read(np.array([0]), ["rewards"], with_last=False)
    assert sum(map(len, few.parts["rewards"])) < sum(map(len, whole.parts["rewards"])) // 2
    assert few.taken("rewards").tolist() == whole.taken("rewards", slice(int(store.num_steps[0]))).tolist()


def test_two_parts_are_read_at_a_time_and_come_in_their_order() -> None:
    both = threading.Barrier(2, timeout=IN_TIME_S)

    def read(number: int) -> int:
        if number < 4:  # the last one is alone
            both.wait()
        return number

    assert list(in_pairs([partial(read, number) for number in range(5)])) == [0, 1, 2, 3, 4]
    assert list(in_pairs([])) == []
