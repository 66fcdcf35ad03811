"""Datasets: a rollout that writes beside one that doesn't, and writing and reading beside pyarrow alone.

Rows are those of CartPole, and of four stacked frames of 84 x 84 bytes as one observation. `write, pyarrow` stands
beside pyarrow that writes the same tables, made before anything is measured, into one file, with the same compression.
`read, pyarrow` makes train batches in a shuffled order; beside it pyarrow reads the same columns in theirs. Bytes are
those of the tables in memory.

    python -m benchmarks.datasets [--quick]
"""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.command import run
from benchmarks.pairs import Record, Sizes, in_turns, paired, record, steps_per_s
from benchmarks.replay import SLOTS, Coin, Frames, made
from rollflow.nodes import Rollout
from rollflow.sinks import DatasetSink, DatasetSource
from rollflow.stream import Fragment

FRAGMENT_LENGTH, COUNT = 64, {"CartPole": 16, "pixels": 4}


def measure(sizes: Sizes) -> list[Record]:
    """Lines for each kind of row."""
    records: list[Record] = []
    for kind, count in COUNT.items():
        folder = Path(tempfile.mkdtemp(prefix="rollflow-datasets-"))
        try:
            records += measured(kind, made(kind, count), folder, sizes)
        finally:
            shutil.rmtree(folder)
    return records


def measured(kind: str, fragments: list[Fragment], folder: Path, sizes: Sizes) -> list[Record]:
    """Lines for one kind of row."""
    pairs = in_turns(
        rolling(kind, folder, sizes, writes=True), rolling(kind, folder, sizes, writes=False), sizes.rounds
    )
    records = [record(f"{kind}, a rollout that writes", SLOTS, pairs, aim=None, beside_name="the rollout alone")]
    num_steps = sum(fragment.num_steps for fragment in fragments)
    ready = folder / "ready"
    with DatasetSink(ready, max_file_bytes=1 << 40, max_file_s=1e9) as sink:
        for fragment in fragments:
            sink(fragment)
    files = [next((ready / name).glob("*.parquet")) for name in ("steps", "episodes")]
    tables = [table_groups(path) for path in files]
    nbytes = sum(table.nbytes for groups in tables for table in groups)

    def write() -> int:
        shutil.rmtree(folder / "written", ignore_errors=True)
        with DatasetSink(folder / "written") as sink:
            for fragment in fragments:
                sink(fragment)
        return num_steps

    def write_tables() -> int:
        for groups, name in zip(tables, ("steps", "episodes"), strict=True):
            with pq.ParquetWriter(
                folder / name, groups[0].schema, compression="zstd", compression_level=1, use_dictionary=["eps_id"]
            ) as writer:
                for table in groups:
                    writer.write_table(table, row_group_size=len(table))
        return num_steps

    def read() -> int:
        return sum(len(batch["rewards"]) for batch in DatasetSource(ready, shuffle_seed=0).batches())

    def read_tables() -> int:
        return sum(len(pq.read_table(path, use_threads=False)) for path in files[:1])

    for name, ours, beside in (("write", write, write_tables), ("read", read, read_tables)):
        line = paired(f"{kind}, {name}, pyarrow", SLOTS, ours, beside, aim=None, sizes=sizes, beside_name="pyarrow")
        per_step = nbytes / num_steps / 1e6
        line["mb_per_s"] = [round(line[side] * per_step, 1) for side in ("steps_per_s", "beside")]
        records.append(line)
    return records


def rolling(kind: str, folder: Path, sizes: Sizes, *, writes: bool) -> Callable[[], float]:
    """Steps per second of a rollout that was just opened, with a sink or without."""

    def rate() -> float:
        env: Any = "CartPole-v1" if kind == "CartPole" else Frames(SLOTS)
        options: dict[str, Any] = {"num_envs": SLOTS} if kind == "CartPole" else {}
        shutil.rmtree(folder / "rolled", ignore_errors=True)
        with Rollout(env, module=Coin(), fragment_length=FRAGMENT_LENGTH, seed=0, **options) as rollout:
            fragments = rollout.fragments()
            if not writes:
                return steps_per_s(lambda: next(fragments).num_steps, sizes.seconds)
            with DatasetSink(folder / "rolled") as sink:
                return steps_per_s(lambda: written(sink, next(fragments)), sizes.seconds)

    return rate


def written(sink: DatasetSink, fragment: Fragment) -> int:
    """Hand a fragment to a sink."""
    sink(fragment)
    return fragment.num_steps


def table_groups(path: Path) -> list[pa.Table]:
    """The row groups of a file, as tables in memory."""
    with pq.ParquetFile(path) as file:
        return [file.read_row_group(each) for each in range(file.num_row_groups)]


if __name__ == "__main__":
    run(measure)
