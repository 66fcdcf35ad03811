"""Datasets: a rollout that writes beside one that doesn't, and writing and reading beside pyarrow alone.

Rows are those of CartPole, and of four stacked frames of 84 x 84 bytes as one observation. A rollout that trains has
its policy learn from each fragment, in four passes; the other one's reader does nothing. `write, pyarrow` stands beside
pyarrow that writes the same tables, made before anything is measured, into one file, with the same compression.
`read, pyarrow` makes train batches in a shuffled order; beside it pyarrow reads the file on one core. `read, by hand`
has beside it what one would write oneself: the whole file in memory, and batches of the same size of its steps in a
random order. Bytes are those of the tables in memory. `to Minari` converts a dataset of CartPole to one of Minari's:
once of random actions, with episodes of about 21 steps, once of a rule that balances for some hundred. Beside it
Minari's own collector plays the same, step by step. The aim is of converting alone; `played` plays and writes the
dataset first. Both are left out where Minari can't collect.

    python -m benchmarks.datasets [--quick]
"""

import importlib.util
import os
import random
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from benchmarks.command import run
from benchmarks.pairs import Record, Sizes, in_turns, paired, record, steps_per_s
from benchmarks.policies import Mlp
from benchmarks.replay import SLOTS, Coin, Frames, made
from rollflow import DatasetSink, DatasetSource, Fragment, RLModule, Rollout
from rollflow.nodes import RandomModule
from rollflow.sinks.datasets.minari_episodes import write_minari

FRAGMENT_LENGTH, COUNT, AGAIN = 64, {"CartPole": 16, "pixels": 4}, {"CartPole": 8, "pixels": 1}
AIM, WRITING_AIM, MINARI_AIM = 0.7, 0.97, 20.0
MINARI_STEPS = 64 * 512  # of a dataset
OF_EPISODES = ("run", "eps_id", "t")  # columns that no batch has
BATCH_SIZE = 2048  # of a source that is not told another


class Balance(RLModule):
    """Pushes the cart to where the pole leans, and is about to."""

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {"actions": (batch["obs"][:, 2:].sum(-1) > 0).long()}


def measure(sizes: Sizes) -> list[Record]:
    """Lines for each kind of row."""
    records: list[Record] = []
    for kind, num_fragments in COUNT.items():
        folder = Path(tempfile.mkdtemp(prefix="rollflow-datasets-"))
        try:
            records += measured(kind, made(kind, num_fragments), folder, sizes)
        finally:
            shutil.rmtree(folder)
    if importlib.util.find_spec("jax") is None or importlib.util.find_spec("minari") is None:
        print("to Minari: left out, minari[create] is not installed here", file=sys.stderr)
        return records
    with tempfile.TemporaryDirectory(prefix="rollflow-minari-") as name:
        return [*records, *to_minari(Path(name), sizes)]


def measured(kind: str, fragments: list[Fragment], folder: Path, sizes: Sizes) -> list[Record]:
    """Lines for one kind of row."""
    records = []
    for learns in (True, False) if kind == "CartPole" else (False,):
        writing, alone = (rolling(kind, folder, sizes, writes=writes, learns=learns) for writes in (True, False))
        name, pairs = "training" if learns else "a rollout", in_turns(writing, alone, sizes.rounds)
        aim = WRITING_AIM if learns else None
        records.append(record(f"{kind}, {name} that writes", SLOTS, pairs, aim=aim, beside_name="the same alone"))
    num_steps = sum(fragment.num_steps for fragment in fragments)
    ready = folder / "ready"
    with DatasetSink(ready, max_file_bytes=1 << 40, max_file_s=1e9) as sink:
        for fragment in fragments:
            sink(fragment)
    files = [next((ready / name).glob("*.parquet")) for name in ("steps", "episodes")]
    tables = [table_groups(path) for path in files]
    nbytes = sum(table.nbytes for groups in tables for table in groups)

    again = AGAIN[kind]  # so that the beginning and the end of a file, and of a dataset, count as little as they do

    def write() -> int:
        shutil.rmtree(folder / "written", ignore_errors=True)
        with DatasetSink(folder / "written") as sink:
            for fragment in again * fragments:
                sink(fragment)
        return again * num_steps

    def write_tables() -> int:
        for groups, name in zip(tables, ("steps", "episodes"), strict=True):
            with pq.ParquetWriter(
                folder / name, groups[0].schema, compression="zstd", compression_level=1, use_dictionary=["eps_id"]
            ) as writer:
                for table in again * groups:
                    writer.write_table(table, row_group_size=len(table))
        return again * num_steps

    def read() -> int:
        return sum(len(batch["rewards"]) for batch in DatasetSource(ready, shuffle_seed=0).batches())

    def read_tables() -> int:
        with pq.ParquetFile(files[0]) as file:  # `pq.read_table` has threads in any case
            return len(file.read(use_threads=False))

    for name, ours, beside, other, aim in (
        ("write", write, write_tables, "pyarrow", AIM),
        ("read", read, read_tables, "pyarrow", AIM),
        ("read", read, partial(read_by_hand, files[0]), "by hand", None),
    ):
        line = paired(f"{kind}, {name}, {other}", SLOTS, ours, beside, aim=aim, sizes=sizes, beside_name=other)
        per_step = nbytes / num_steps / 1e6
        line["mb_per_s"] = [round(line[side] * per_step, 1) for side in ("steps_per_s", "beside")]
        records.append(line)
    return records


def to_minari(folder: Path, sizes: Sizes) -> list[Record]:
    """Lines for datasets of Minari's with short and with long episodes, beside its own collector."""
    os.environ["MINARI_DATASETS_PATH"] = str(folder)
    numbers, records = count(), []
    for length, balances in (("short", False), ("long", True)):
        path = folder / f"recorded-{length}"
        theirs = partial(collected_by_minari, numbers, balances=balances)
        ours = partial(converted, numbers, path), partial(recorded_and_converted, numbers, path, balances=balances)
        ours[1]()
        for name, each, aim in zip(("to Minari", "played, to Minari"), ours, (MINARI_AIM, None), strict=True):
            line = f"{length} CartPole, {name}"
            records.append(paired(line, SLOTS, each, theirs, aim=aim, sizes=sizes, beside_name="Minari's collector"))
    return records


def recorded_and_converted(numbers: Iterator[int], path: Path, *, balances: bool) -> int:
    """Steps of a rollout's dataset that was converted to one of Minari's."""
    shutil.rmtree(path, ignore_errors=True)
    module = Balance if balances else RandomModule
    options: dict[str, Any] = {"fragment_length": 256, "num_fragments": MINARI_STEPS // (64 * 256)}
    with (
        Rollout("CartPole-v1", num_envs=64, module=module, **options) as rollout,
        DatasetSink(path, rollout=rollout) as sink,
    ):
        for fragment in rollout.fragments():
            sink(fragment)
    return converted(numbers, path)


def converted(numbers: Iterator[int], path: Path) -> int:
    """Steps of a dataset that was converted to one of Minari's."""
    source = DatasetSource(path, complete_episodes=True)
    spaces = source.observation_space, source.action_space
    folder = write_minari(source.fragments(), spaces, source.description, f"cartpole/ours-v{next(numbers)}")
    shutil.rmtree(folder)
    return source.num_steps


def collected_by_minari(numbers: Iterator[int], *, balances: bool) -> int:
    """Steps of a dataset that Minari has collected itself."""
    import minari

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of facts that a dataset should have
        env, generator = minari.DataCollector(gym.make("CartPole-v1")), random.Random(0)
        observation, _ = env.reset()
        for _ in range(MINARI_STEPS):
            action = int(observation[2] + observation[3] > 0) if balances else generator.getrandbits(1)
            observation, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                observation, _ = env.reset()
        dataset_id = f"cartpole/theirs-v{next(numbers)}"
        env.create_dataset(dataset_id)
        shutil.rmtree(Path(os.environ["MINARI_DATASETS_PATH"]) / dataset_id)
    return MINARI_STEPS


def rolling(kind: str, folder: Path, sizes: Sizes, *, writes: bool, learns: bool) -> Callable[[], float]:
    """Steps per second of a rollout that was just opened, with a sink or without."""

    def rate() -> float:
        env: Any = "CartPole-v1" if kind == "CartPole" else Frames(SLOTS)
        options: dict[str, Any] = {"num_envs": SLOTS} if kind == "CartPole" else {}
        shutil.rmtree(folder / "rolled", ignore_errors=True)
        module = Mlp() if learns else Coin()
        with ExitStack() as opened:
            rollout = opened.enter_context(Rollout(env, module=module, fragment_length=FRAGMENT_LENGTH, **options))
            sink = opened.enter_context(DatasetSink(folder / "rolled")) if writes else None
            fragments, update = rollout.fragments(), updating(module) if learns else None

            def step() -> int:
                fragment = next(fragments)
                if sink is not None:
                    sink(fragment)
                if update is not None:
                    update(fragment)
                return fragment.num_steps

            return steps_per_s(step, sizes.seconds)

    return rate


def updating(module: Any) -> Callable[[Fragment], None]:
    """What has a module learn from a fragment: four passes over its steps, in quarters, by policy gradients."""
    optimizer = torch.optim.Adam(module.parameters(), lr=3e-4)

    def update(fragment: Fragment) -> None:
        obs, actions, rewards = (torch.from_numpy(fragment.gather(name)) for name in ("obs", "actions", "rewards"))
        for _ in range(4):
            for rows in torch.randperm(len(rewards)).chunk(4):
                logits = module.forward_train({"obs": obs[rows]})["action_dist_inputs"]
                logp = torch.distributions.Categorical(logits=logits).log_prob(actions[rows])
                optimizer.zero_grad()
                (-(logp * rewards[rows]).mean()).backward()
                optimizer.step()

    return update


def read_by_hand(path: Path) -> int:
    """Read all columns of a file, and make batches of its steps in a random order."""
    table = pq.read_table(path, columns=[name for name in pq.read_schema(path).names if name not in OF_EPISODES])
    columns = {name: items_of(table[name].combine_chunks()) for name in table.column_names}
    order = np.random.default_rng(0).permutation(len(table))
    steps = 0
    for begin in range(0, len(order), BATCH_SIZE):
        rows = order[begin : begin + BATCH_SIZE]
        batch = {name: torch.from_numpy(items[rows]) for name, items in columns.items()}
        steps += len(batch["rewards"])
    return steps


def items_of(column: pa.Array) -> NDArray[Any]:
    """The items of a column, any[n, ...]."""
    items: NDArray[Any]
    if pa.types.is_fixed_size_binary(column.type):
        items = np.frombuffer(column.buffers()[1], np.uint8).reshape(len(column), -1)
    elif pa.types.is_fixed_size_list(column.type):
        items = column.flatten().to_numpy().reshape(len(column), -1)
    else:
        items = column.to_numpy(zero_copy_only=False)
    return items


def table_groups(path: Path) -> list[pa.Table]:
    """The row groups of a file, as tables in memory."""
    with pq.ParquetFile(path) as file:
        return [file.read_row_group(each) for each in range(file.num_row_groups)]


if __name__ == "__main__":
    run(measure)
