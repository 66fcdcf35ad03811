"""Replay: keeps the steps of fragments, and gives batches of them at a controlled rate."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollflow.nodes.connectors.checked import checked_count
from rollflow.nodes.connectors.common.tensors import as_array, tensor_of
from rollflow.nodes.connectors.connector_v2 import ConnectorV2
from rollflow.sinks.replay.checkpoint import CheckpointFolder
from rollflow.sinks.replay.rate import RateLimiter, ReplayReport, SamplesPerInsert, StepCounts
from rollflow.sinks.replay.removers import Oldest, Remover, check_goes_with
from rollflow.sinks.replay.row_columns import RowColumns, Storage, columns_of, items_of
from rollflow.sinks.replay.row_index import RowIndex
from rollflow.sinks.replay.sampled_steps import SampledSteps, check_size, detached
from rollflow.sinks.replay.samplers import Sampler, Uniform
from rollflow.sinks.replay.turns import Side, Turns, run_both
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ReplayError
from rollflow.stream.data.tree import map_tree
from rollflow.stream.fragments.fragment import Fragment
from rollflow.stream.graph.channel import Inlet, Outlet

Batch = dict[str, Any]


class Replay:
    """Steps of fragments, to be sampled again and again: an object that one calls, and a node of a graph.

        capacity      rows: one for each step, and one for the last observation of each episode
        sampler       None: `Uniform()`
        remover       None: `Oldest()`
        rate          how inserts and samples hold each other back; None: they don't
        batch_size    rows of a batch, as a node of a graph, and of `sample()`
        pieces        learner pieces that change each batch, in order; they get the `SampledSteps` as `episodes`
        storage       where and how steps are kept
        seed          of all that is drawn; None: a fresh one

        turns         of inserts and samples, for whoever waits in an event loop

    A batch maps names to tensors any[B, ...]: `obs`, `new_obs`, `actions`, `rewards`, `terminateds`, `truncateds`, the
    module's outputs and `policy_version`, with dtypes as they came; and

        ids         i64[B]  for `update_priorities`
        age         i64[B]  rows written since the step's
        weights     f32[B]  importance weights, of a prioritized sampler

    Inserts and samples may come from several threads. In a graph, `fragments` come in and `batches` go out.

    Raises ValueError for arguments out of bounds, and ReplayError for those that can't go together.
    """

    def __init__(
        self,
        capacity: int,
        *,
        sampler: Sampler | None = None,
        remover: Remover | None = None,
        rate: SamplesPerInsert | None = None,
        batch_size: int = 256,
        pieces: Sequence[ConnectorV2] = (),
        storage: Storage | None = None,
        seed: int | None = None,
    ) -> None:
        self.capacity = checked_count("capacity", capacity, 1)
        self.batch_size = checked_count("batch_size", batch_size, 1)
        self.sampler = Uniform() if sampler is None else sampler
        self.remover = Oldest() if remover is None else remover
        self.pieces = list(pieces)
        self._storage = Storage() if storage is None else storage
        frames = checked_count("frames", self._storage.frames, 1)
        num_rows = self.remover.num_rows(capacity)
        if num_rows >= 2**31 - 1:
            raise ValueError(f"capacity is {capacity}, expected fewer than 2**31 rows")
        if rate is not None and rate.min_size > capacity:
            text = f"min_size is {rate.min_size}, but the capacity is {capacity}: nothing could ever be sampled; "
            raise ReplayError(f"{text}expected a min_size below the capacity").see("replay")
        check_goes_with(self.remover, self.sampler, None if rate is None else rate.ratio)
        self._rate = RateLimiter(rate, self.batch_size * self.sampler.steps)
        self._rows = RowIndex(num_rows, frames - 1)
        self._columns: RowColumns | None = None
        self._generator = np.random.default_rng(seed)
        self.sampler.begin(self._rows)
        self.remover.begin(self._rows)
        self.turns = Turns()
        self._lock = self.turns.lock
        self._folder: CheckpointFolder | None = None  # that was saved to, or loaded from, last
        self._saving = threading.Lock()

    # Taking and giving

    def __len__(self) -> int:
        """Number of steps that may be sampled."""
        return self._rows.num_live

    def __call__(self, fragment: Fragment) -> None:
        """Insert a fragment."""
        self.insert(fragment)

    def insert(self, fragment: Fragment, *, wait_s: float | None = 0.0) -> None:
        """Copy a fragment's steps; the oldest make room.

        wait_s    seconds to wait for other threads' samples, where the rate holds the insert back; None: any time

        Raises ReplayError where the rate lets it through no sooner, and for fragments of another kind.
        """
        with self._lock:
            if steps := self._announced(fragment):
                self._wait("insert", lambda: self._admits_insert(steps), wait_s)
                self._insert(fragment)
                self.turns.notify()

    async def insert_in_loop(self, fragment: Fragment) -> None:
        """Insert a fragment as soon as the rate lets it through; in an event loop that `turns` has entered."""
        with self._lock:
            steps = self._announced(fragment)
        await self.turns.wait_in_loop("insert", lambda: not steps or self._admits_insert(steps))
        self.insert(fragment)

    def may_insert(self, steps: int) -> bool:
        """True if the rate lets so many steps be inserted now. Raises ReplayError where it never can."""
        with self._lock:
            return self._admits_insert(steps)

    def sample(self, count: int | None = None, *, wait_s: float | None = 0.0, max_bytes: int | None = None) -> Batch:
        """A batch of `count` rows; None: of `batch_size`.

        wait_s       seconds to wait for other threads' inserts, where the rate holds the sample back; None: any time
        max_bytes    of the batch; None: any number

        Raises ReplayError where the rate lets it through no sooner, and where nothing can be sampled, or the batch is
        larger; nothing is counted or removed then.
        """
        return self.sample_of_shard(count, wait_s=wait_s, max_bytes=max_bytes)[0]

    def sample_of_shard(
        self, count: int | None = None, *, wait_s: float | None = 0.0, max_bytes: int | None = None
    ) -> tuple[Batch, dict[str, float]]:
        """A batch as of `sample`, and what its weights stand for beside other shards: `held`, `scale` and `beta`.

        held    number of steps that might have been drawn; for `scale` and `beta` see `Draw`
        """
        count = self.batch_size if count is None else checked_count("count", count, 1)
        steps = count * self.sampler.steps
        with self._lock:
            self._wait("sample", lambda: self._admits_sample(steps), wait_s)
            batch, facts = self._sample(count, max_bytes)
            self._rate.most_samples = max(self._rate.most_samples, steps)
            self.turns.notify()
        return batch, facts

    def holding(self, elsewhere: StepCounts) -> dict[str, float]:
        """What this replay counts as one of several shards: `held` steps, `mass`, and its `batch_size` and `min_size`.

        elsewhere    counts of the other shards, which the rate adds to its own from now on
        """
        with self._lock:
            if elsewhere != self._rate.elsewhere:
                self._rate.elsewhere = elsewhere
                self.turns.notify()
            rate, rows = self._rate.rate, self._rows
            mass, least = self.sampler.mass(rows), 0 if rate is None else rate.min_size
            return {"held": rows.num_live, "mass": mass, "batch_size": self.batch_size, "min_size": least}

    def may_sample(self, count: int | None = None) -> bool:
        """True if the rate lets `count` rows be sampled now; None: `batch_size`. Raises ReplayError: it never can."""
        steps = (self.batch_size if count is None else count) * self.sampler.steps
        with self._lock:
            return self._admits_sample(steps)

    def batches(self, count: int | None = None) -> Iterator[Batch]:
        """Batches for as long as the rate lets them be sampled: after each insert in a plain loop.

        Raises ReplayError without a rate, with which it would never end.
        """
        if self._rate.rate is None:
            text = "batches() ends when the rate lets no more be sampled; expected Replay(rate=...), or sample()"
            raise ReplayError(text).see("replay")
        while self.may_sample(count):
            yield self.sample(count)

    def update_priorities(self, ids: Any, values: Any) -> None:
        """Set the priorities of steps, by a batch's `ids`, i64[B], from values f[B] such as TD errors.

        Steps that have gone meanwhile are passed over. Raises ReplayError for a sampler without priorities.
        """
        numbers, magnitudes = as_array(ids).astype(np.int64), detached(values)
        if numbers.shape != magnitudes.shape or numbers.ndim != 1:
            raise ReplayError(
                f"update_priorities: ids are {list(numbers.shape)} and values {list(magnitudes.shape)}, expected one "
                "value for each row of a batch"
            )
        with self._lock:
            self.sampler.update_priorities(self._rows, numbers, magnitudes)

    def report(self) -> ReplayReport:
        """What has been counted so far, the ratio reached, and which side waits."""
        with self._lock:
            rate, rows = self._rate, self._rows
            return ReplayReport(
                inserted=rows.inserted,
                removed=rows.removed,
                sampled=rate.sampled,
                ratio=rate.reached(rows.inserted),
                wanted=None if rate.rate is None else rate.rate.ratio,
                waiting=self.turns.waiting,
                insert_wait_s=self.turns.waited_s("insert"),
                sample_wait_s=self.turns.waited_s("sample"),
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the columns; 0 before the first insert."""
        return 0 if self._columns is None else self._columns.nbytes

    # As a node of a graph

    async def run(self, fragments: Inlet[Fragment], batches: Outlet[Batch]) -> None:
        """Insert fragments and send batches, each as soon as the rate lets it through.

        After the last fragment, sends what the rate still allows; without a rate, nothing more.
        """
        is_over = False
        self.turns.enter_loop()

        async def insert_all() -> None:
            nonlocal is_over
            async for fragment in fragments:
                await self.insert_in_loop(fragment)
            is_over = True
            with self._lock:
                self.turns.notify()

        async def send_all() -> None:
            while True:
                await self.turns.wait_in_loop("sample", lambda: is_over or self.may_sample())
                if not self.may_sample() or (is_over and self._rate.rate is None):
                    return
                await batches.send(self.sample())

        await run_both(insert_all, send_all)

    # Checkpoints

    def get_state(self, since: int = 0) -> dict[str, Any]:
        """All that the replay holds, as plain values and arrays: steps, priorities, counts, the generator.

        since    position up to which rows may be left out, as a `CheckpointFolder` says
        """
        with self._lock:
            rows = self._rows
            columns = None if self._columns is None else self._columns.get_state(since, rows.end, rows.spare_in_use)
            return {
                "capacity": self.capacity,
                "frames": self._storage.frames,
                "rows": rows.get_state(),
                "columns": columns,
                "sampler": self.sampler.get_state(),
                "remover": self.remover.get_state(),
                "rate": self._rate.get_state(),
                "generator": self._generator.bit_generator.state,
            }

    def set_state(self, state: dict[str, Any]) -> None:
        """Take what `get_state` gave, of a replay made with the same arguments; it goes on exactly as that one.

        Raises ReplayError where the arguments differ.
        """
        for name, own in (("capacity", self.capacity), ("frames", self._storage.frames)):
            if state[name] != own:
                raise ReplayError(f"the state is of a replay with {name}={state[name]}, expected {own}").see("replay")
        with self._lock:
            self._rows.set_state(state["rows"])
            self._folder = None
            if state["columns"] is not None:
                self._columns = self._make_columns(state["columns"]["items"])
                self._columns.set_state(state["columns"])
            self.sampler.set_state(state["sampler"])
            self.remover.set_state(state["remover"])
            self._rate.set_state(state["rate"])
            self._generator.bit_generator.state = state["generator"]
            self.turns.notify()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state into a folder; what has not changed since it was saved or loaded there is not written again.

        An older checkpoint there stands until the new one is whole. One replay at a time writes to a folder.
        """
        with self._saving:
            if self._folder is None or self._folder.path != Path(path):
                self._folder = CheckpointFolder(path)
            self._folder.write(self.get_state(self._folder.since()))

    def load(self, path: str | os.PathLike[str]) -> None:
        """Take the state of a folder that `save` has written. Raises ReplayError where it is missing or altered."""
        with self._saving:
            folder = CheckpointFolder(path)
            self.set_state(folder.read())
            self._folder = folder

    # Inside

    def _insert(self, fragment: Fragment) -> None:
        rows, chunks = self._rows, fragment.chunks
        columns = columns_of(fragment, self._storage.extra)
        if self._columns is None:
            self._columns = self._make_columns(items_of(columns))
        self._columns.check(columns)
        lane = f"{fragment.lane} {fragment.layout.episode_id(0, 0)}"  # no other lane's, also when a run goes on
        placement = rows.place(lane, fragment.layout, chunks)
        self._columns.write(placement.begin, placement.source, columns)
        if len(placement.ended):
            last = fragment.last_observations()
            self._columns.put(Columns.OBS, placement.rows, map_tree(lambda leaf: leaf[placement.ended], last))
        self.sampler.note_removed(rows, placement.removed)
        self.sampler.note_inserted(rows, placement.inserted)
        self._remove(self.remover.after_insert(rows, self.sampler, placement.inserted))
        self._check_min_size()

    def _sample(self, count: int, max_bytes: int | None) -> tuple[Batch, dict[str, float]]:
        rows = self._rows
        if not rows.num_live:
            raise ReplayError("the replay has no steps, expected an insert before the first sample").see("replay")
        assert self._columns is not None
        draw = self.sampler.draw(rows, count, self._generator)
        steps = SampledSteps(rows, self._columns, draw, self._storage.frames, self._generator)
        batch = steps.batch()
        shared_data: dict[str, Any] = {}
        context: Any = steps  # which pieces for replays take in the place of episodes
        for piece in self.pieces:
            batch = piece(rl_module=None, batch=batch, episodes=context, explore=False, shared_data=shared_data)
        convert = tensor_of if self.pieces else torch.from_numpy  # a piece's arrays may be read-only
        for name, data in batch.items():
            batch[name] = convert(data) if type(data) is np.ndarray else map_tree(_tensor, data)
        check_size(batch, max_bytes)
        facts = {"held": rows.num_live, "scale": draw.scale, "beta": draw.beta}
        self._rate.sampled += draw.num_steps
        self._remove(self.remover.after_sample(rows, draw))
        return batch, facts

    def _remove(self, positions: NDArray[np.int64]) -> None:
        if len(positions):
            self._rows.remove(positions)
            self.sampler.note_removed(self._rows, positions)

    def _make_columns(self, items: dict[str, Any]) -> RowColumns:
        return RowColumns(items, self._rows.num_rows, self._rows.num_spare, self._storage.path)

    def _check_min_size(self) -> None:
        rate, rows = self._rate.rate, self._rows
        if rate is None or rows.num_live >= rate.min_size or not rows.begin:
            return
        if (kept := int(np.count_nonzero(rows.is_step))) < rate.min_size:
            raise ReplayError(
                f"min_size is {rate.min_size}, but all {rows.num_rows} rows are taken with {kept} steps in them, the "
                "others by last observations of episodes: nothing could ever be sampled; expected a smaller min_size, "
                "or a larger capacity"
            ).see("replay")

    def _announced(self, fragment: Fragment) -> int:
        """Steps of a fragment that comes; samples that wait look again if none was as large. The lock is held."""
        if not isinstance(fragment, Fragment):
            raise ReplayError(f"a replay takes fragments of one agent, got {type(fragment).__name__}").see("replay")
        steps = fragment.num_steps
        self._rate.check(inserts=steps)
        if steps > self._rate.most_inserts:
            self._rate.most_inserts = steps
            self.turns.notify()
        return steps

    def _admits_insert(self, steps: int) -> bool:
        self._rate.check(inserts=steps)
        return self._rate.admits_insert(steps, self._rows.inserted, self._rows.removed)

    def _admits_sample(self, steps: int) -> bool:
        self._rate.check(samples=steps)
        return self._rate.admits_sample(steps, self._rows.inserted, self._rows.removed)

    def _wait(self, side: Side, admits: Callable[[], bool], wait_s: float | None) -> None:
        """Wait until the rate lets a side go on; the lock is held. Raises ReplayError once `wait_s` is over."""
        if self.turns.wait(side, admits, wait_s):
            return
        if self._rate.rate is None:
            raise ReplayError("the replay has no steps, expected an insert before the first sample").see("replay")
        other = "sample more first" if side == "insert" else "insert more first"
        raise ReplayError(
            f"the rate holds this {side} back: {self._rows.inserted} steps are inserted, {self._rows.num_live} there, "
            f"{self._rate.sampled} sampled, at {self._rate.rate}; {other}, or give wait_s where another thread does"
        ).see("replay")


def _tensor(leaf: Any) -> Any:
    return tensor_of(leaf) if isinstance(leaf, np.ndarray) else leaf
