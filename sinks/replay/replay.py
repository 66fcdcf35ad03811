"""Replay: keeps the steps of fragments, and gives batches of them at a controlled rate."""

import copy
import logging
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, repeat
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any, Literal, TypeVar
from urllib.parse import quote

import anyio
import numpy as np
import torch

from rollflow.nodes.argument_checks import (
    check_numbers,
    checked_count,
    checked_number,
    checking_constructor,
    ids_by_text,
)
from rollflow.nodes.connectors.common.batches import as_array, tensor_of
from rollflow.nodes.connectors.connector_v2 import ConnectorV2
from rollflow.sinks.replay.checkpoint import CheckpointFolder
from rollflow.sinks.replay.row_index import Room, RowColumns, RowIndex, Storage, columns_of, items_of
from rollflow.sinks.replay.sampled_steps import SampledSteps, check_order, check_size
from rollflow.sinks.replay.samplers import Draw, Sampler, Uniform
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ReplayError, shown
from rollflow.stream.data.tree import map_tree
from rollflow.stream.fragments.fragment import Fragment
from rollflow.stream.graph.channel import Inlet, Outlet
from rollflow.stream.graph.node import ending_quietly, out_of_group
from rollflow.stream.graph.wakeup import Wakeup
from rollflow.stream.multi_agent.multi_agent_fragment import AnyFragment, MultiAgentFragment
from rollflow.stream.net.backoff import WaitReminder


@dataclass(frozen=True, slots=True)
class SamplesPerInsert:
    """Ratio of sampled to inserted steps that a replay keeps to.

        ratio           steps sampled for each step inserted, above 0
        min_size        steps that must be there before the first sample, from 1 on
        error_buffer    sampled steps by which either side may be ahead; more, if the inserts and samples so far
                        would hold up each other with so few

    Raises ValueError for numbers outside these bounds.
    """

    ratio: float
    min_size: int = 1
    error_buffer: float = 0.0

    def __post_init__(self) -> None:
        checked_number("ratio", self.ratio, above=0, why="steps sampled for each step inserted")
        checked_count("min_size", self.min_size, 1)
        checked_number("error_buffer", self.error_buffer, least=0)

    def buffer(self, inserts: int, samples: int) -> float:
        """The error buffer with which inserts and samples of up to these sizes, in steps, never hold up each other."""
        return max(self.error_buffer, (samples + inserts * self.ratio) / 2, inserts * self.ratio)


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What a replay has counted, in steps. `str(report)` is a sentence.

    inserted, removed, sampled    steps so far
    ratio, wanted                 steps sampled for each inserted beyond `min_size`; what was asked for, or None
    waiting                       "insert" or "sample", the side that the rate holds back now; None: neither
    insert_wait_s, sample_wait_s  seconds for which each side was held back
    """

    inserted: int
    removed: int
    sampled: int
    ratio: float
    wanted: float | None
    waiting: str | None
    insert_wait_s: float
    sample_wait_s: float

    def __str__(self) -> str:
        asked = "" if self.wanted is None else f", {self.wanted:g} asked for"
        holds = {"insert": "inserts wait for samples", "sample": "samples wait for inserts", None: "nobody waits"}
        return (
            f"{self.inserted:,} steps inserted, {self.removed:,} removed, {self.sampled:,} sampled: "
            f"{self.ratio:.2f} samples per insert{asked}; {holds[self.waiting]} "
            f"(inserts waited {self.insert_wait_s:.1f} s, samples {self.sample_wait_s:.1f} s)"
        )


Batch = dict[str, Any]
_SIZES = "sampled", "most_inserts", "most_samples"


class ReplayTable:
    """Rows of steps, without locks, and which inserts and samples the rate lets go on.

    With I steps inserted, D removed and S sampled, a ratio r, a minimum m and an error buffer b, let the balance be
    I·r - S.

        n steps may be sampled     if I - D ≥ m and the balance stays at least m·r - b
        n steps may be inserted    if I + n - D ≤ m or the balance stays at most m·r + b

    An insert that begins below the minimum is always let through: nothing can be sampled until the minimum is reached.
    The two conditions leave always one side free if 2·b ≥ (steps of a sample) + (steps of an insert)·r. To ask changes
    no count: an insert counts among the sizes once it has come, even if it waits, and a sample once it is drawn.

    capacity       number of rows
    sampler        of this table alone
    rate           None: inserts always may, samples from the first step on
    batch_size     rows of an ordinary sample
    generator      of all that is drawn

    sampled          number of steps sampled
    most_inserts     steps of the largest insert that has come so far, or waits
    most_samples     steps of the largest sample so far
    """

    def __init__(
        self,
        capacity: int,
        sampler: Sampler,
        *,
        storage: Storage,
        rate: SamplesPerInsert | None,
        batch_size: int,
        generator: np.random.Generator,
    ) -> None:
        self.sampler, self.rate = sampler, rate
        self.sampled, self.most_inserts, self.most_samples = 0, 1, batch_size * sampler.steps
        self.rows = RowIndex(capacity, storage.frames - 1)
        self._storage, self._generator = storage, generator
        self._columns: RowColumns | None = None
        sampler.begin(self.rows)

    @property
    def nbytes(self) -> int:
        """Bytes of the columns; 0 before the first insert."""
        return 0 if self._columns is None else self._columns.nbytes

    def announce(self, steps: int) -> bool:
        """Take note of an insert that comes; True if none was as large, so that samples that wait look again."""
        is_largest = steps > self.most_inserts
        self.most_inserts = max(self.most_inserts, steps)
        return is_largest

    def admits_insert(self, steps: int) -> bool:
        """True if the rate lets so many steps be inserted, which were announced."""
        rate, rows = self.rate, self.rows
        if rate is None or rows.inserted - rows.removed < rate.min_size:
            return True
        most = rate.min_size * rate.ratio + rate.buffer(self.most_inserts, self.most_samples)
        balance = rows.inserted * rate.ratio - self.sampled
        return balance + steps * rate.ratio <= most or bool(self.sampler.waits_for(rows))

    def admits_sample(self, count: int) -> bool:
        """True if the rate lets so many rows be sampled.

        The buffer suits the samples so far. A larger sample goes on if the largest insert would have to wait, so
        that one of them always goes on.
        """
        rate, rows = self.rate, self.rows
        may = rows.inserted - rows.removed >= (1 if rate is None else rate.min_size)
        if may and rate is not None:
            buffer = rate.buffer(self.most_inserts, self.most_samples)
            least = min(count * self.sampler.steps - buffer, buffer - self.most_inserts * rate.ratio)
            may = rows.inserted * rate.ratio - self.sampled - rate.min_size * rate.ratio >= least
        return may and not self.sampler.waits_for(rows)

    def checked(self, fragment: Fragment) -> Callable[[], None]:
        """The insert of a fragment, to be called before anything else changes; no step comes or goes yet.

        Raises ReplayError for a fragment of another kind, and for one that is too large.
        """
        columns = columns_of(fragment, self._storage.extra)
        if self._columns is not None:
            self._columns.check(columns)
        lane = f"{fragment.lane} {fragment.layout.episode_id(0, 0)}"  # no other lane's, also when a run goes on
        room = self.rows.room_for(lane, fragment.layout, fragment.chunks)
        self._check_min_size(room)
        return partial(self._insert, fragment, columns, self._columns or self._make_columns(items_of(columns)), room)

    def _insert(self, fragment: Fragment, columns: dict[str, Any], into: RowColumns, room: Room) -> None:
        """Copy a fragment's steps; the oldest make room."""
        rows, self._columns = self.rows, into
        rows.place(room)
        into.write(room.begin, room.source, columns)
        if len(room.ended):
            last = fragment.last_observations()
            into.put(Columns.OBS, room.rows, map_tree(lambda leaf: leaf[room.ended], last))
        self.sampler.note_removed(rows, room.removed)
        self.sampler.note_inserted(rows, room.inserted)

    def drawn(self, count: int, pieces: Sequence[ConnectorV2]) -> tuple[Batch, Draw]:
        """A batch of `count` rows that `pieces` have changed, and the draw, which is not counted yet."""
        rows = self.rows
        assert self._columns is not None
        draw = self.sampler.draw(rows, count, self._generator)
        steps = SampledSteps(rows, self._columns, draw, self._storage.frames, self._generator)
        batch = steps.batch()
        shared_data: dict[str, Any] = {}
        context: Any = steps  # which pieces for replays take in the place of episodes
        for piece in pieces:
            try:
                batch = piece(rl_module=None, batch=batch, episodes=context, explore=False, shared_data=shared_data)
            except Exception as error:
                error.add_note(f"in piece {type(piece).__name__} of the replay")
                raise
        convert = tensor_of if pieces else torch.from_numpy  # a piece's arrays may be read-only
        for name, data in batch.items():
            batch[name] = convert(data) if type(data) is np.ndarray else map_tree(_tensor, data)
        return batch, draw

    def count(self, draw: Draw, count: int) -> None:
        """Count a draw of `count` rows."""
        self.sampled += draw.num_steps
        self.most_samples = max(self.most_samples, count * self.sampler.steps)

    def _make_columns(self, items: dict[str, Any]) -> RowColumns:
        return RowColumns(items, self.rows.num_rows, self.rows.num_spare, self._storage.path)

    def _check_min_size(self, room: Room) -> None:
        rate, rows = self.rate, self.rows
        begin = rows.end + int(room.sizes.sum()) - rows.num_rows  # that would be kept
        if rate is None or begin <= 0 or rows.num_live - (begin - rows.begin) >= rate.min_size:
            return
        if (kept := rows.num_steps_with(room)) < rate.min_size:
            raise ReplayError(
                f"min_size is {rate.min_size}, but all {rows.num_rows} rows are taken with {kept} steps in them, the "
                "others by last observations of episodes: nothing could ever be sampled; expected a smaller min_size, "
                "or a larger capacity"
            )

    # Checkpoints

    def get_state(self, since: int) -> dict[str, Any]:
        """All that the table holds, as plain values and arrays: steps, priorities, counts, the generator.

        since    position up to which rows may be left out
        """
        rows = self.rows
        return {
            "rows": rows.get_state(),
            "columns": self._columns and self._columns.get_state(since, rows.end, rows.spare_in_use),
            "sampler": self.sampler.get_state(),
            "rate": {name: getattr(self, name) for name in _SIZES},
            "generator": self._generator.bit_generator.state,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Take what `get_state` gave with all rows."""
        # Another sampler is found out first, and columns, whose file is made anew, come last.
        self.sampler.set_state(state["sampler"])
        self.sampled, self.most_inserts, self.most_samples = (state["rate"][name] for name in _SIZES)
        self._generator.bit_generator.state = state["generator"]
        self.rows.set_state(state["rows"])
        if state["columns"] is not None:
            self._columns = self._make_columns(state["columns"]["items"])
            self._columns.set_state(state["columns"])


def _tensor(leaf: Any) -> Any:
    return tensor_of(leaf) if isinstance(leaf, np.ndarray) else leaf


logger = logging.getLogger(__name__)

Side = Literal["insert", "sample"]
Parts = Sequence[tuple[ReplayTable, Fragment]]
T = TypeVar("T")


class Turns:
    """Lets threads, and tasks of one event loop, wait until their side may go on.

    lock       held while anything is changed, or looked at
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._waited: dict[Side, float] = {"insert": 0.0, "sample": 0.0}  # by waits that are over
        self._waiting: dict[object, tuple[Side, float, Callable[[], object]]] = {}  # who: side, since when, how woken
        self._changed: anyio.Event | None = None  # where tasks wait
        self._loop_thread, self._bell = 0, Wakeup()  # rung by other threads than the event loop's

    @property
    def waiting(self) -> Side | None:
        """The side that waits now; None: neither does."""
        return next((side for side, _, _ in self._waiting.values()), None)

    def waited_s(self, side: Side) -> float:
        """Seconds for which a side has waited, until now."""
        now = monotonic()
        return self._waited[side] + sum(now - since for each, since, _ in self._waiting.values() if each == side)

    def notify(self) -> None:
        """Have those that wait look again; in any thread."""
        with self.lock:
            for _, _, wake in self._waiting.values():
                wake()
            if self._changed is None:
                return
            if self._loop_thread != threading.get_ident():
                self._bell.ring()
                return
            self._changed.set()  # at once: by the bell, the task that inserts could have ended before
            self._changed = anyio.Event()

    def enter_loop(self) -> None:
        """Let tasks of this event loop wait, from now on; `relay` is one of them."""
        self._changed, self._loop_thread = anyio.Event(), threading.get_ident()

    async def relay(self) -> None:
        """Have tasks look again whenever another thread has changed something; until this is cancelled."""
        while True:
            await anyio.wait_readable(self._bell.fileno())
            self._bell.silence()
            self.notify()

    @contextmanager
    def _counted(self, side: Side, wake: Callable[[], object]) -> Iterator[None]:
        """Count the block as a wait of a side, and have `wake` called at each change, with the lock held."""
        who, since = object(), monotonic()
        with self.lock:
            self._waiting[who] = side, since, wake
        try:
            yield
        finally:
            with self.lock:
                del self._waiting[who]
                self._waited[side] += monotonic() - since

    def wait(self, side: Side, admits: Callable[[], T], wait_s: float | None, report: Callable[[], object]) -> T:
        """Wait, with the lock held, until a side may go on: what `admits` returned last.

        wait_s    seconds after which that may be false; None: any time
        report    what is logged at growing intervals, from 5 s on
        """
        if wait_s is not None and wait_s != 0.0:
            checked_number("wait_s", wait_s, least=0, most=inf, noun="seconds")
        found = admits()
        if found or wait_s == 0.0:
            return found
        patience, noted = WaitReminder(wait_s), threading.Condition(self.lock)
        with self._counted(side, noted.notify):
            while not found and not patience.is_over:
                found = noted.wait_for(admits, patience.left)
                if not found and patience.is_long:
                    logger.warning("%s() waits for %.0f s: %s", side, patience.waited_s, report())
        return found

    async def wait_in_loop(self, side: Side, admits: Callable[[], bool]) -> None:
        """Wait in a task, without the lock, until a side may go on."""
        while True:
            with self.lock:
                if admits():
                    return
                changed = self._changed
            assert changed is not None
            with self._counted(side, lambda: None):
                await changed.wait()


@checking_constructor()
class Replay:
    """Steps of fragments, to be sampled again and again: an object that one calls, and a node of a graph.

        capacity      rows: one for each step, and one for the last observation of each episode
        sampler       None: `Uniform()`
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

    Once all rows are taken, the oldest make room.

    Of several agents, the steps of each module stand in a table of their own, with the capacity, the rate, and a copy
    of the sampler. A batch is then module id -> batch, of the modules that the rate lets be sampled.
    An insert waits until the rate of each of its modules lets it through.

    Inserts and samples may come from several threads. In a graph, `fragments` come in and `batches` go out.

    Raises ValueError for arguments out of bounds, and ReplayError for those that can't go together.
    """

    def __init__(
        self,
        capacity: int,
        *,
        sampler: Sampler | None = None,
        rate: SamplesPerInsert | None = None,
        batch_size: int = 256,
        pieces: Sequence[ConnectorV2] = (),
        storage: Storage | None = None,
        seed: int | None = None,
    ) -> None:
        self.capacity = checked_count("capacity", capacity, 1)
        self.batch_size = checked_count("batch_size", batch_size, 1)
        self.sampler = Uniform() if sampler is None else sampler
        self.pieces = [pieces] if isinstance(pieces, ConnectorV2) else list(pieces)
        self._storage = Storage() if storage is None else storage
        _check_parts(self.sampler, rate, self.pieces, self._storage)
        check_numbers(seed=(seed, 0))
        if capacity >= 2**31 - 1:
            raise ValueError(f"capacity is {capacity}, expected fewer than 2**31 rows")
        if rate is not None and rate.min_size > capacity:
            text = f"min_size is {rate.min_size}, but the capacity is {capacity}: nothing could ever be sampled; "
            raise ReplayError(f"{text}expected a min_size below the capacity")
        self._rate, self._seed = rate, seed
        self._unused = copy.deepcopy(self.sampler)  # of which each module's table gets a copy
        one = self._made_table(self.sampler, self._storage, seed)
        self._tables: dict[Any, ReplayTable] = {None: one}  # None: of one agent
        self.turns = Turns()
        self._lock = self.turns.lock
        self._folder: CheckpointFolder | None = None  # that was saved to, or loaded from, last
        self._saving = threading.Lock()

    # Taking and giving

    def __len__(self) -> int:
        """Number of steps that may be sampled."""
        return sum(table.rows.num_live for table in self._tables.values())

    def __repr__(self) -> str:
        return f"<Replay {len(self):,} steps, capacity {self.capacity:,}, sampler {type(self.sampler).__name__}>"

    @property
    def module_ids(self) -> list[Any]:
        """Ids of the modules whose steps are there; of one agent there is none."""
        return [module_id for module_id in self._tables if module_id is not None]

    def __call__(self, fragment: AnyFragment) -> None:
        """Insert a fragment."""
        self.insert(fragment)

    def insert(self, fragment: AnyFragment, *, wait_s: float | None = 0.0) -> None:
        """Copy a fragment's steps; the oldest make room.

        wait_s    seconds to wait for other threads' samples, if the rate holds the insert back; None: any time

        Raises ReplayError if the rate lets it through no sooner, and for fragments of another kind, or that are too
        large; none of their steps is there then.
        """
        with self._lock:
            if parts := self._announced(fragment):
                self._wait("insert", lambda: _admit(parts), wait_s)
                for insert in [table.checked(part) for table, part in parts]:  # all of them before one is written
                    insert()
                self.turns.notify()

    async def insert_in_loop(self, fragment: AnyFragment) -> None:
        """Insert a fragment as soon as the rate lets it through; in an event loop that `turns` has entered."""
        with self._lock:
            parts = self._announced(fragment)
        await self.turns.wait_in_loop("insert", lambda: _admit(parts))
        self.insert(fragment)

    def sample(self, count: int | None = None, *, wait_s: float | None = 0.0, max_bytes: int | None = None) -> Batch:
        """A batch of `count` rows; None: of `batch_size`.

        wait_s       seconds to wait for other threads' inserts, if the rate holds the sample back; None: any time
        max_bytes    of the batch; None: any number

        Raises ReplayError if the rate lets it through no sooner, and if nothing can be sampled, or the batch is
        larger; nothing is counted or removed then.
        """
        count = self.batch_size if count is None else checked_count("count", count, 1)
        with self._lock:
            tables = self._wait("sample", lambda: self._admitting(count), wait_s)
            drawn = {each: table.drawn(count, self.pieces) for each, table in tables.items()}
            batches = {each: batch for each, (batch, _) in drawn.items()}
            check_size(batches, max_bytes)
            for each, (_, draw) in drawn.items():
                tables[each].count(draw, count)
            self.turns.notify()
        return batches.get(None, batches)

    def may_sample(self, count: int | None = None) -> bool:
        """True if the rate lets `count` rows be sampled now; None: `batch_size`."""
        with self._lock:
            return bool(self._admitting(self.batch_size if count is None else count))

    def batches(self, count: int | None = None) -> Iterator[Batch]:
        """Batches for as long as the rate lets them be sampled: after each insert in a plain loop.

        Raises ReplayError without a rate, with which it would never end.
        """
        if self._rate is None:
            text = "batches() ends when the rate lets no more be sampled; expected Replay(rate=...), or sample()"
            raise ReplayError(text)
        while self.may_sample(count):
            yield self.sample(count)

    def update_priorities(self, ids: Any, values: Any, module_id: Any = None) -> None:
        """Set the priorities of steps, by a batch's `ids`, i64[B], from values f[B] such as TD errors.

        module_id    of several agents: the module whose batch it was

        Steps that have gone meanwhile are passed over. Raises ReplayError for a sampler without priorities.
        """
        numbers, magnitudes = as_array(ids).astype(np.int64), as_array(values)
        if numbers.shape != magnitudes.shape or numbers.ndim != 1:
            shapes = f"ids are {list(numbers.shape)} and values {list(magnitudes.shape)}"
            raise ReplayError(f"update_priorities: {shapes}, expected one value for each row of a batch")
        with self._lock:
            table = self._table_of(module_id)
            table.sampler.update_priorities(table.rows, numbers, magnitudes)

    def report(self, module_id: Any = None) -> ReplayReport:
        """What has been counted so far, the ratio reached, and which side waits.

        module_id    of several agents: the module; None: all together
        """
        with self._lock:
            tables = self._tables.values() if module_id is None else [self._table_of(module_id)]
            least = 0 if self._rate is None else self._rate.min_size
            beyond = sum(max(0, table.rows.inserted - least) for table in tables)
            sampled = sum(table.sampled for table in tables)
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
            self.turns.notify()

        async def send_all() -> None:
            while True:
                await self.turns.wait_in_loop("sample", lambda: is_over or self.may_sample())
                if is_over and (self._rate is None or not self.may_sample()):
                    return
                if self.may_sample():  # no other thread has drawn meanwhile
                    await batches.send(self.sample())

        with out_of_group():
            async with anyio.create_task_group() as tasks:
                for beside in (self.turns.relay, insert_all):
                    tasks.start_soon(ending_quietly, beside)
                await send_all()  # which ends behind the last insert
                tasks.cancel_scope.cancel()

    # Checkpoints

    def get_state(self, since: Sequence[int] = ()) -> dict[str, Any]:
        """All that the replay holds, as plain values and arrays: steps, priorities, counts, the generator.

        since    for each table, the position up to which rows may be left out, as a `CheckpointFolder` says
        """
        with self._lock:
            begins = zip(self._tables.items(), chain(since, repeat(0)), strict=False)
            states = [[each, table.get_state(begin)] for (each, table), begin in begins]
            return {**self._arguments(), "tables": states}

    def set_state(self, state: dict[str, Any]) -> None:
        """Take what `get_state` gave, of a replay made with the same arguments; it goes on exactly as that one.

        Raises ReplayError if the arguments differ. Steps of several agents that were there before stay then.
        """
        for name, own in self._arguments().items():
            if (found := state.get(name)) != own:
                if name == "sampler":
                    found, own = found or "<one without a state>", own or "one without a state, such as the default"
                raise ReplayError(f"the state is of a replay with {name}={found}, expected {own}")
        if (most := state.get("max_samples")) is not None:
            text = f"the state is of a replay with max_samples={most}, which there is no longer: expected one without"
            raise ReplayError(text)
        with self._lock:
            try:
                self._tables = self._restored(dict(state["tables"]))
            except ReplayError:
                raise
            except (KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
                text = f"the state can't be taken: {error!r}; expected get_state() of a replay with the same arguments"
                raise ReplayError(text) from error
            self._folder = None
            self.turns.notify()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state into a folder; what has not changed since it was saved or loaded there is not written again.

        An older checkpoint there stands until the new one is whole. One replay at a time writes to a folder.
        """
        with self._saving:
            if self._folder is None or self._folder.path != Path(path):
                self._folder = CheckpointFolder(path)
            with self._folder.held():  # from the look at what is there on
                self._folder.write(self.get_state(self._folder.since()))

    def captured(self, before: Path) -> Callable[[Path], None]:
        """What writes the state as it is now to a new folder: how `Rollout.attach` saves a replay with each checkpoint.

        before    folder of the state that was written last, if there is one: files that have not changed become links
        """
        with self._saving:
            newest = None if self._folder is None else self._folder.newest
            folder = self._folder = CheckpointFolder(before, newest)
            return partial(folder.write, self.get_state(folder.since()))

    def load(self, path: str | os.PathLike[str]) -> None:
        """Take the state of a folder that `save` has written. Raises ReplayError if it is missing or altered."""
        with self._saving:
            folder = CheckpointFolder(path)
            self.set_state(folder.read())
            self._folder = folder

    # Inside

    def _arguments(self) -> dict[str, Any]:
        """Sizes, and the class name of the sampler: None for one without a state, as for any other such."""
        has_state = bool(self.sampler.parts) or type(self.sampler).get_state is not Sampler.get_state
        sizes = {"capacity": self.capacity, "frames": self._storage.frames}
        return sizes | {"sampler": type(self.sampler).__name__ if has_state else None}

    def _restored(self, states: dict[Any, Any]) -> dict[Any, ReplayTable]:
        """Tables with these states: new ones of modules; the one that is there of one agent."""
        tables = self._tables if None in states else self._tables_of(states)
        if None in states and (None not in tables or len(states) > 1):
            text = "the replay has steps of several agents, got the state of one; expected that of several"
            raise ReplayError(f"{text}, or a new Replay")
        for each, of_table in states.items():
            tables[each].set_state(of_table)
        return tables

    def _table_of(self, module_id: Any) -> ReplayTable:
        try:
            table = self._tables.get(module_id)
        except TypeError:  # it has no hash, so that it is no module's id
            table = None
        if table is None:
            text = f"there are no steps of module {module_id!r}, expected module_id to be one of {self.module_ids}"
            raise ReplayError(text)
        return table

    def _tables_of(self, module_ids: Iterable[Any], others: Iterable[Any] = ()) -> dict[Any, ReplayTable]:
        """New tables by the ids of their modules. Raises ReplayError if two ids, such as 1 and "1", have one text.

        others    ids of the modules that have a table already

        The text of an id tells the module's file and its seed from those of the others.
        """
        module_ids = list(dict.fromkeys(module_ids))
        ids_by_text("module", [*others, *module_ids], ReplayError)
        tables: dict[Any, ReplayTable] = {}
        for module_id in module_ids:
            text, storage, seed = str(module_id), self._storage, self._seed
            if storage.path is not None:
                storage = replace(storage, path=f"{os.fspath(storage.path)}.{quote(text, safe=' ')}")
            seed = None if seed is None else zlib.crc32(text.encode(), seed & 0xFFFFFFFF)
            tables[module_id] = self._made_table(copy.deepcopy(self._unused), storage, seed)
        return tables

    def _made_table(self, sampler: Sampler, storage: Storage, seed: int | None) -> ReplayTable:
        return ReplayTable(
            self.capacity,
            sampler,
            storage=storage,
            rate=self._rate,
            batch_size=self.batch_size,
            generator=np.random.default_rng(seed),
        )

    def _announced(self, fragment: AnyFragment) -> Parts:
        """The parts of a fragment by table, whose sizes the rates take note of; samples that wait look again."""
        if isinstance(fragment, Fragment):
            if None not in self._tables:
                raise ReplayError("the replay has steps of several agents, got a fragment of one")
            parts = [(self._tables[None], fragment.host)] if fragment.num_steps else []
        elif isinstance(fragment, MultiAgentFragment):
            parts = self._parts_of(fragment)
        else:
            raise ReplayError(f"a replay takes fragments, got {type(fragment).__name__}")
        if any([table.announce(part.num_steps) for table, part in parts]):
            self.turns.notify()
        return parts

    def _parts_of(self, fragment: MultiAgentFragment) -> list[tuple[ReplayTable, Fragment]]:
        """The steps of each module, and its table, which is made if there is none."""
        if None in self._tables:
            if self._tables[None].rows.inserted:
                raise ReplayError("the replay has steps of one agent, got a fragment of several")
        parts = fragment.by_module()
        tables = {} if None in self._tables else self._tables
        new = [each for each in parts if each not in tables]
        self._tables = tables | self._tables_of(new, tables)
        return [(self._tables[each], part) for each, part in parts.items()]

    def _admitting(self, count: int) -> dict[Any, ReplayTable]:
        """The tables whose rate lets a sample through."""
        return {each: table for each, table in self._tables.items() if table.admits_sample(count)}

    def _wait(self, side: Side, admits: Callable[[], T], wait_s: float | None) -> T:
        """What `admits` returns once a side may go on; the lock is held. Raises ReplayError once `wait_s` is over."""
        if found := self.turns.wait(side, admits, wait_s, self.report):
            return found
        raise _held_back(side, self._tables, self._rate, wait_s)


def _held_back(
    side: Side, tables: Mapping[Any, ReplayTable], rate: SamplesPerInsert | None, wait_s: float | None
) -> ReplayError:
    """The error of a side that the rate of these tables, by module, holds back, after so many seconds of waiting."""
    awaited = {table.sampler.waits_for(table.rows) for table in tables.values() if table.rows.num_live} - {""}
    if side == "sample" and awaited:
        return ReplayError(f"the replay has no {awaited.pop()} yet, expected more inserts before a sample")
    if rate is None:
        return ReplayError("the replay has no steps, expected an insert before the first sample")
    held = [
        f"{table.rows.inserted} steps are inserted, {table.rows.num_live} there, {table.sampled} sampled"
        + (f" of module {module_id!r}" if module_id is not None else "")
        for module_id, table in tables.items()
    ]
    other = "sample" if side == "insert" else "insert"
    more = f"in {wait_s:g} s no other thread did" if wait_s else "or give wait_s where another thread does"
    text = f"the rate holds this {side} back: {'; '.join(held)}, at {rate}; {other} more first, {more}"
    return ReplayError(text)


def _admit(parts: Parts) -> bool:
    """True if the rates let all parts of a fragment be inserted."""
    return all([table.admits_insert(part.num_steps) for table, part in parts])


def _check_parts(sampler: Any, rate: Any, pieces: Sequence[Any], storage: Any) -> None:
    """Raise ReplayError for an argument of a replay that is of another kind."""
    expected: list[tuple[str, Any, Any, str]] = [
        ("sampler", sampler, Sampler, "a sampler such as Prioritized()"),
        ("storage", storage, Storage, "a Storage(), or None"),
        ("rate", rate, SamplesPerInsert | None, "a SamplesPerInsert(), or None"),
        *(("pieces", piece, ConnectorV2, "connector pieces such as SampledNStepReturns()") for piece in pieces),
    ]
    for name, given, kind, text in expected:
        if not isinstance(given, kind):
            raise ReplayError(f"{name} is {shown(given)}, expected {text}")
    for piece in pieces:
        if piece.lookback:
            raise ReplayError(
                f"{piece.name} looks back {piece.lookback} steps, which a replay's samples do not show; expected "
                f"Storage(frames={piece.lookback + 1}) for stacks of observations, or the piece before a learner"
            )
    check_order(pieces)
