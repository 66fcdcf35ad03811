"""Replay table: the steps of one agent, or of the agents of one module, in rows, with the sampler that draws them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from rollflow.nodes.connectors.common.batches import tensor_of
from rollflow.nodes.connectors.connector_v2 import ConnectorV2
from rollflow.sinks.replay.rate import RateLimiter
from rollflow.sinks.replay.row_columns import RowColumns, Storage, columns_of, items_of
from rollflow.sinks.replay.row_index import Room, RowIndex
from rollflow.sinks.replay.sampled_steps import SampledSteps
from rollflow.sinks.replay.samplers import Draw, Sampler
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ReplayError
from rollflow.stream.data.tree import map_tree
from rollflow.stream.fragments.fragment import Fragment

Batch = dict[str, Any]


class ReplayTable:
    """Rows of steps, without locks.

    capacity       number of rows
    sampler        of this table alone
    max_samples    how often a step is drawn before it is removed; None: any number
    rate           counts of what is inserted and sampled
    generator      of all that is drawn
    """

    def __init__(
        self,
        capacity: int,
        sampler: Sampler,
        *,
        max_samples: int | None,
        storage: Storage,
        rate: RateLimiter,
        generator: np.random.Generator,
    ) -> None:
        self.sampler, self.rate = sampler, rate
        self.rows = RowIndex(capacity, storage.frames - 1)
        self._storage, self._generator, self._max_samples = storage, generator, max_samples
        self._columns: RowColumns | None = None
        self._draws = np.zeros(0 if max_samples is None else capacity, np.int32)  # of the step in each row
        sampler.begin(self.rows)

    @property
    def nbytes(self) -> int:
        """Bytes of the columns; 0 before the first insert."""
        return 0 if self._columns is None else self._columns.nbytes

    def announce(self, steps: int) -> bool:
        """Take note of an insert that comes; True if none was as large, so that samples that wait look again."""
        is_largest = steps > self.rate.most_inserts
        self.rate.most_inserts = max(self.rate.most_inserts, steps)
        return is_largest

    def admits_insert(self, steps: int) -> bool:
        """True if the rate lets so many steps be inserted."""
        may = self.rate.admits_insert(steps, self.rows.inserted, self.rows.removed)
        return may or bool(self.sampler.waits_for(self.rows))

    def admits_sample(self, count: int) -> bool:
        """True if the rate lets so many rows be sampled."""
        may = self.rate.admits_sample(count * self.sampler.steps, self.rows.inserted, self.rows.removed)
        return may and not self.sampler.waits_for(self.rows)

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
        placement = rows.place(room)
        self._columns.write(placement.begin, placement.source, columns)
        if len(placement.ended):
            last = fragment.last_observations()
            self._columns.put(Columns.OBS, placement.rows, map_tree(lambda leaf: leaf[placement.ended], last))
        self.sampler.note_removed(rows, placement.removed)
        self.sampler.note_inserted(rows, placement.inserted)
        if self._max_samples is not None:
            self._draws[placement.inserted % rows.num_rows] = 0

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
        """Count a draw of `count` rows, and remove steps that have been drawn as often as they may."""
        self.rate.sampled += draw.num_steps
        self.rate.most_samples = max(self.rate.most_samples, count * self.sampler.steps)
        if self._max_samples is None:
            return
        trained = draw.positions if draw.trained is None else draw.positions[draw.trained]
        positions, counts = np.unique(trained, return_counts=True)
        at = positions % self.rows.num_rows
        self._draws[at] += counts.astype(np.int32)
        drawn_out = positions[(self._draws[at] >= self._max_samples) & self.rows.is_live[at]]
        if len(drawn_out):
            self.rows.remove(drawn_out)
            self.sampler.note_removed(self.rows, drawn_out)

    def _make_columns(self, items: dict[str, Any]) -> RowColumns:
        return RowColumns(items, self.rows.num_rows, self.rows.num_spare, self._storage.path)

    def _check_min_size(self, room: Room) -> None:
        rate, rows = self.rate.rate, self.rows
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
            "draws": self._draws.copy(),
            "rate": self.rate.get_state(),
            "generator": self._generator.bit_generator.state,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Take what `get_state` gave with all rows."""
        # Another sampler is found out first, and columns, whose file is made anew, come last.
        self.sampler.set_state(state["sampler"])
        self._draws[:] = state["draws"]
        self.rate.set_state(state["rate"])
        self._generator.bit_generator.state = state["generator"]
        self.rows.set_state(state["rows"])
        if state["columns"] is not None:
            self._columns = self._make_columns(state["columns"]["items"])
            self._columns.set_state(state["columns"])


def _tensor(leaf: Any) -> Any:
    return tensor_of(leaf) if isinstance(leaf, np.ndarray) else leaf
