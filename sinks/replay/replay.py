"""Replay: keeps the steps of fragments, and gives batches of them at a controlled rate."""

import copy
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import anyio
import numpy as np
from numpy.typing import NDArray

from rollflow.nodes.connectors.checked import checked_count
from rollflow.nodes.connectors.common.tensors import as_array
from rollflow.nodes.connectors.connector_v2 import ConnectorV2
from rollflow.sinks.replay.checkpoint import read_state, write_state
from rollflow.sinks.replay.rate import RateLimiter, ReplayReport, SamplesPerInsert
from rollflow.sinks.replay.removers import Oldest, Remover, check_goes_with
from rollflow.sinks.replay.replay_table import Batch as Batch
from rollflow.sinks.replay.replay_table import ReplayTable
from rollflow.sinks.replay.replay_table import Storage as Storage
from rollflow.sinks.replay.sampled_steps import check_size
from rollflow.sinks.replay.samplers import Sampler, Uniform
from rollflow.sinks.replay.turns import Side, Turns
from rollflow.stream.data.errors import ReplayError
from rollflow.stream.fragments.fragment import Fragment
from rollflow.stream.graph.channel import Inlet, Outlet
from rollflow.stream.multi_agent.multi_agent_fragment import AnyFragment, MultiAgentFragment

Parts = Sequence[tuple[ReplayTable, Fragment]]


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

    Of several agents, the steps of each module stand in a table of their own, with the capacity, the rate, and a copy
    of the sampler and of the remover. A batch is then module id -> batch, of the modules that the rate lets be sampled.
    An insert waits until the rate of each of its modules lets it through.

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
        checked_count("frames", self._storage.frames, 1)
        num_rows = self.remover.num_rows(capacity)
        if num_rows >= 2**31 - 1:
            raise ValueError(f"capacity is {capacity}, expected fewer than 2**31 rows")
        if rate is not None and rate.min_size > capacity:
            raise ReplayError(
                f"min_size is {rate.min_size}, but the capacity is {capacity}: nothing could ever be sampled; expected "
                "a min_size below the capacity"
            ).see("replay")
        check_goes_with(self.remover, self.sampler, None if rate is None else rate.ratio)
        self._rate, self._seed = rate, seed
        self._unused = copy.deepcopy((self.sampler, self.remover))  # of which each module gets copies
        self._tables: dict[Any, ReplayTable] = {None: self._table(self.sampler, self.remover)}  # None: of one agent
        self.turns = Turns()
        self._lock = self.turns.lock

    # Taking and giving

    def __len__(self) -> int:
        """Number of steps that may be sampled."""
        return sum(table.rows.num_live for table in self._tables.values())

    @property
    def module_ids(self) -> list[Any]:
        """Ids of the modules whose steps are there; of one agent there is none."""
        return [module_id for module_id in self._tables if module_id is not None]

    def sampler_of(self, module_id: Any) -> Sampler:
        """The sampler of a module's steps. Raises ReplayError for a module that no fragment has had."""
        return self._table_of(module_id).sampler

    def __call__(self, fragment: AnyFragment) -> None:
        """Insert a fragment."""
        self.insert(fragment)

    def insert(self, fragment: AnyFragment, *, wait_s: float | None = 0.0) -> None:
        """Copy a fragment's steps; the oldest make room.

        wait_s    seconds to wait for other threads' samples, where the rate holds the insert back; None: any time

        Raises ReplayError where the rate lets it through no sooner, and for fragments of another kind.
        """
        with self._lock:
            if parts := self._announced(fragment):
                self._wait("insert", lambda: _admit(parts), wait_s)
                for table, part in parts:
                    table.insert(part)
                self.turns.notify()

    async def insert_in_loop(self, fragment: AnyFragment) -> None:
        """Insert a fragment as soon as the rate lets it through; in an event loop that `turns` has entered."""
        with self._lock:
            parts = self._announced(fragment)
        await self.turns.wait_in_loop("insert", lambda: _admit(parts))
        self.insert(fragment)

    def may_insert(self, steps: int) -> bool:
        """True if the rate lets so many steps be inserted now, of each module. Raises ReplayError: it never can."""
        with self._lock:
            return all(table.admits_insert(steps) for table in self._tables.values())

    def sample(self, count: int | None = None, *, wait_s: float | None = 0.0, max_bytes: int | None = None) -> Batch:
        """A batch of `count` rows; None: of `batch_size`.

        wait_s       seconds to wait for other threads' inserts, where the rate holds the sample back; None: any time
        max_bytes    of the batch; None: any number

        Raises ReplayError where the rate lets it through no sooner, and where nothing can be sampled, or the batch is
        larger; nothing is counted or removed then.
        """
        count = self.batch_size if count is None else checked_count("count", count, 1)
        with self._lock:
            self._wait("sample", lambda: self._admits_sample(count), wait_s)
            tables = {each: table for each, table in self._tables.items() if table.admits_sample(count)}
            drawn = {each: table.drawn(count, self.pieces) for each, table in tables.items()}
            batches = {each: batch for each, (batch, _) in drawn.items()}
            check_size(batches, max_bytes)
            for each, table in tables.items():
                table.count(drawn[each][1], count)
            self.turns.notify()
        return batches[None] if None in batches else batches

    def may_sample(self, count: int | None = None) -> bool:
        """True if the rate lets `count` rows be sampled now; None: `batch_size`. Raises ReplayError: it never can."""
        with self._lock:
            return self._admits_sample(self.batch_size if count is None else count)

    def batches(self, count: int | None = None) -> Iterator[Batch]:
        """Batches for as long as the rate lets them be sampled: after each insert in a plain loop.

        Raises ReplayError without a rate, with which it would never end.
        """
        if self._rate is None:
            raise ReplayError(
                "batches() ends when the rate lets no more be sampled, but the replay has no rate; expected "
                "Replay(rate=SamplesPerInsert(...)), or sample()"
            ).see("replay")
        while self.may_sample(count):
            yield self.sample(count)

    def update_priorities(self, ids: Any, values: Any, module_id: Any = None) -> None:
        """Set the priorities of steps, by a batch's `ids`, i64[B], from values f[B] such as TD errors.

        module_id    of several agents: the module whose batch it was

        Steps that have gone meanwhile are passed over. Raises ReplayError for a sampler without priorities.
        """
        numbers, magnitudes = as_array(ids).astype(np.int64), detached(values)
        if numbers.shape != magnitudes.shape or numbers.ndim != 1:
            raise ReplayError(
                f"update_priorities: ids are {list(numbers.shape)} and values {list(magnitudes.shape)}, expected one "
                "value for each row of a batch"
            )
        with self._lock:
            table = self._table_of(module_id)
            table.sampler.update_priorities(table.rows, numbers, magnitudes)

    def report(self, module_id: Any = None) -> ReplayReport:
        """What has been counted so far, the ratio reached, and which side waits.

        module_id    of several agents: the module; None: all together
        """
        with self._lock:
            tables = list(self._tables.values()) if module_id is None else [self._table_of(module_id)]
            beyond = sum(table.rate.beyond(table.rows.inserted) for table in tables)
            sampled = sum(table.rate.sampled for table in tables)
            return ReplayReport(
                inserted=sum(table.rows.inserted for table in tables),
                removed=sum(table.rows.removed for table in tables),
                sampled=sampled,
                ratio=sampled / beyond if beyond else 0.0,
                wanted=None if self._rate is None else self._rate.ratio,
                waiting=self.turns.waiting,
                insert_wait_s=self.turns.waited_s("insert"),
                sample_wait_s=self.turns.waited_s("sample"),
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the columns; 0 before the first insert."""
        return sum(table.nbytes for table in self._tables.values())

    # As a node of a graph

    async def run(self, fragments: Inlet[AnyFragment], batches: Outlet[Batch]) -> None:
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
                if not self.may_sample() or (is_over and self._rate is None):
                    return
                await batches.send(self.sample())

        raised: Exception | None = None
        async with anyio.create_task_group() as tasks:

            async def work(part: Callable[[], Any]) -> None:
                nonlocal raised
                try:
                    await part()
                except Exception as error:
                    raised = error  # as it is, not in a group
                    tasks.cancel_scope.cancel()

            tasks.start_soon(work, insert_all)
            tasks.start_soon(work, send_all)
        if raised is not None:
            raise raised

    # Checkpoints

    def get_state(self) -> dict[str, Any]:
        """All that the replay holds, as plain values and arrays: steps, priorities, counts, the generator."""
        with self._lock:
            state: dict[str, Any] = {"capacity": self.capacity, "frames": self._storage.frames}
            if None in self._tables:
                return state | self._tables[None].get_state()
            return state | {"modules": [[each, table.get_state()] for each, table in self._tables.items()]}

    def set_state(self, state: dict[str, Any]) -> None:
        """Take what `get_state` gave, of a replay made with the same arguments; it goes on exactly as that one.

        Raises ReplayError where the arguments differ.
        """
        for name, own in (("capacity", self.capacity), ("frames", self._storage.frames)):
            if state[name] != own:
                raise ReplayError(f"the state is of a replay with {name}={state[name]}, expected {own}").see("replay")
        with self._lock:
            if "modules" in state:
                self._tables = {each: self._table_for(each) for each, _ in state["modules"]}
                for each, of_table in state["modules"]:
                    self._tables[each].set_state(of_table)
            else:
                self._tables[None].set_state(state)
            self.turns.notify()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state into a file, which takes the place of an older one only when it is whole."""
        write_state(path, self.get_state())

    def load(self, path: str | os.PathLike[str]) -> None:
        """Take the state of a file that `save` has written. Raises ReplayError for another file."""
        self.set_state(read_state(path))

    # Inside

    def _table(self, sampler: Sampler, remover: Remover, module_id: Any = None) -> ReplayTable:
        """A new table, of a module or of one agent."""
        storage, seed = self._storage, self._seed
        if module_id is not None:
            if storage.path is not None:
                storage = replace(storage, path=f"{os.fspath(storage.path)}.{quote(str(module_id), safe=' ')}")
            seed = None if seed is None else zlib.crc32(str(module_id).encode(), seed & 0xFFFFFFFF)
        return ReplayTable(
            self.capacity,
            sampler,
            remover,
            storage=storage,
            rate=RateLimiter(self._rate, self.batch_size * sampler.steps),
            generator=np.random.default_rng(seed),
        )

    def _table_for(self, module_id: Any) -> ReplayTable:
        """A new table of a module."""
        return self._table(*copy.deepcopy(self._unused), module_id)

    def _table_of(self, module_id: Any) -> ReplayTable:
        table = self._tables.get(module_id)
        if table is None:
            raise ReplayError(f"there are no steps of module {module_id!r}, expected one of {self.module_ids}").see(
                "replay"
            )
        return table

    def _announced(self, fragment: AnyFragment) -> Parts:
        """What a fragment that comes has for each table; samples that wait look again. The lock is held."""
        if isinstance(fragment, Fragment):
            if None not in self._tables:
                raise ReplayError("the replay has steps of several agents, got a fragment of one").see("replay")
            parts = [(self._tables[None], fragment)] if fragment.num_steps else []
        elif isinstance(fragment, MultiAgentFragment):
            parts = self._parts_of(fragment)
        else:
            raise ReplayError(f"a replay takes fragments, got {type(fragment).__name__}").see("replay")
        if any([table.announce(part.num_steps) for table, part in parts]):
            self.turns.notify()
        return parts

    def _parts_of(self, fragment: MultiAgentFragment) -> list[tuple[ReplayTable, Fragment]]:
        """The steps of each module, and its table, which is made if there is none."""
        if None in self._tables:
            if self._tables[None].rows.inserted:
                raise ReplayError("the replay has steps of one agent, got a fragment of several").see("replay")
            self._tables = {}
        parts = {each: fragment.of_module(each) for each in fragment.module_ids}
        parts = {each: part for each, part in parts.items() if len(part.chunks.slot)}
        new = {each: self._table_for(each) for each in parts if each not in self._tables}
        self._tables |= new
        return [(self._tables[each], part) for each, part in parts.items()]

    def _admits_sample(self, count: int) -> bool:
        return any([table.admits_sample(count) for table in self._tables.values()])

    def _wait(self, side: Side, admits: Callable[[], bool], wait_s: float | None) -> None:
        """Wait until the rate lets a side go on; the lock is held. Raises ReplayError once `wait_s` is over."""
        if self.turns.wait(side, admits, wait_s):
            return
        if self._rate is None:
            raise ReplayError("the replay has no steps, expected an insert before the first sample").see("replay")
        other = "sample more first" if side == "insert" else "insert more first"
        held = [
            f"{table.rows.inserted} steps are inserted, {table.rows.num_live} there, {table.rate.sampled} sampled"
            + (f" of module {module_id!r}" if module_id is not None else "")
            for module_id, table in self._tables.items()
        ]
        raise ReplayError(
            f"the rate holds this {side} back: {'; '.join(held)}, at {self._rate}; {other}, or give wait_s where "
            "another thread does"
        ).see("replay")


def detached(values: Any) -> NDArray[Any]:
    """A tensor's values, or an array's or a list's, as an array any[...]."""
    return np.asarray(as_array(values.detach() if hasattr(values, "detach") else values))


def _admit(parts: Parts) -> bool:
    """True if the rates let all parts of a fragment be inserted."""
    return all([table.admits_insert(part.num_steps) for table, part in parts])
