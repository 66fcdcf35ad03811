"""Columns of a lane's fragments: their types, and the memory that they lie in."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rollflow.stream.data.blocks import BlockLayout, BlockPool, PrivateBlock, SharedBlock
from rollflow.stream.data.column import Column
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ColumnError
from rollflow.stream.data.space import is_columnar, row_of
from rollflow.stream.data.tree import Tree, kind_of, leaves_of, map_tree
from rollflow.stream.fragments.fragment import FragmentLayout

FINAL_OBS = "final_obs"


class LaneMemory(Protocol):
    """Memory for columns of a lane that another process writes to."""

    def next_columns(self) -> dict[str, Column]:
        """New columns for a fragment; the contents are undefined."""
        ...

    def observations(self, row: int) -> Tree:
        """The observations written for a row, as the environment gave them: a tree of arrays `any[N, ...]`."""
        ...


class SharedRows(NamedTuple):
    """Location of a fragment's columns in shared memory, valid from before its first step.

    number, block    number of the pool's block, and the block, u8[n]
    final_obs        last observations, in the rows in which their episodes ended; None: the `obs` column has them
    """

    layout: BlockLayout
    pool: BlockPool[SharedBlock]
    number: int
    block: NDArray[np.uint8]
    final_obs: Column | None


class LaneColumns:
    """Makes the columns of one fragment after the other; their memory is reused once nothing refers to it.

    memory       memory of the columns that another process writes to; None: there are none
    is_shared    whether columns lie in shared memory: see `SharedRows`

    shared       location of the columns made last; None: they are not shared
    """

    def __init__(self, layout: FragmentLayout, memory: LaneMemory | None, *, is_shared: bool = False) -> None:
        self.shared: SharedRows | None = None
        self._layout = layout
        self._memory = memory
        self._is_shared = is_shared
        self._rows = layout.lookback + layout.num_rows
        self._blocks: tuple[BlockLayout, BlockPool[Any]] | None = None  # of columns that are not in `memory`
        self._in_blocks: dict[str, Tree] = {}  # name -> dtypes and shapes of such a column
        self._made: list[Column] = []  # such columns, of the last fragment
        self._types: dict[int, tuple[gym.Space[Any], Column | None]] = {}

    def first(self, observation_space: gym.Space[Any]) -> dict[str, Column]:
        """The columns of the first fragment, without the extra outputs, whose types follow from the first step."""
        slots = self._layout.num_slots
        types: dict[str, Tree] = {
            Columns.ACTIONS: row_of(self._layout.action_space, slots),
            Columns.REWARDS: np.zeros(slots, np.float32),
            Columns.TERMINATEDS: np.zeros(slots, np.bool_),
            Columns.TRUNCATEDS: np.zeros(slots, np.bool_),
            Columns.POLICY_VERSION: np.zeros(slots, np.int64),
        }
        columns = {Columns.OBS: self.observations(observation_space)}
        columns |= {name: self._empty(name, row, self._rows) for name, row in types.items()}
        return columns if self._memory is None else columns | self._memory.next_columns()

    def observations(self, space: gym.Space[Any]) -> Column:
        """A new column for observations in a space."""
        return self._empty(Columns.OBS, row_of(space, self._layout.num_slots), self._rows + 1)

    def refusal(
        self, error: ColumnError, declared: gym.Space[Any] | None, observations: Tree, count: int
    ) -> ColumnError:
        """The error for observations, a tree of arrays `any[count, ...]`, that pieces left and the column refused.

        error       the column's own
        declared    the space that the pieces have declared, if the column has another since they fit none; else None
        """
        text = None if declared is None else self.observations(declared).mismatch(observations, count)
        refusal = ColumnError(text or str(error))
        refusal.add_note(
            "connector pieces wrote these observations into the episodes; a piece that changes their shape or dtype "
            "says so by recompute_output_observation_space"
        )
        return refusal

    def type_of(self, space: gym.Space[Any]) -> Column | None:
        """A column for observations in a space that has no rows, to convert others by; None: the space has no columns.

        It is made once for each space.
        """
        known = self._types.get(id(space))
        if known is None:
            made = Column.empty(Columns.OBS, row_of(space, self._layout.num_slots), 0) if is_columnar(space) else None
            known = self._types[id(space)] = space, made
        return known[1]

    def extra(self, name: str, values: Tree) -> Column:
        """A new column for an output with `values`, a tree of arrays `any[N, ...]`. Raises ColumnError for others."""
        slots = self._layout.num_slots
        row = map_tree(np.asarray, values)
        for leaf in leaves_of(row):
            if leaf.shape[:1] != (slots,) or leaf.dtype.hasobject:
                raise ColumnError(
                    f"output '{name}' is {leaf.dtype}{list(leaf.shape)}, expected numbers with a leading axis of "
                    f"{slots}, one row per slot"
                ).see("module")
        return self._empty(name, row, self._rows)

    def like(self, old: Mapping[str, Column], *, are_written: bool) -> dict[str, Column]:
        """The columns of the next fragment, with the types of the last one's.

        are_written    whether environments write observations straight into their column
        """
        columns = {} if self._memory is None else self._memory.next_columns()
        if not are_written:
            columns.pop(Columns.OBS, None)  # pieces rewrite observations: these are of another type
        rest = {name: column for name, column in old.items() if name not in columns}
        # Types change with the first step, which adds outputs and may retype observations: these are other columns.
        if self._made != list(rest.values()):
            rows = {name: (column.row(0), len(column)) for name, column in rest.items()}
            kinds = {name: kind_of(row) for name, (row, _) in rows.items()}
            if self._blocks is None or self._in_blocks != kinds:
                self._in_blocks = kinds
                if self._is_shared and not self._layout.resets_next_step:
                    rows[FINAL_OBS] = old[Columns.OBS].row(0), self._rows
                layout = BlockLayout(rows)
                self._blocks = layout, BlockPool(layout.size, SharedBlock if self._is_shared else PrivateBlock)
        assert self._blocks is not None
        layout, pool = self._blocks
        index, block = pool.take()
        made = layout.columns(block)
        if self._is_shared:
            self.shared = SharedRows(layout, pool, index, block, made.get(FINAL_OBS))
        self._made = [made[name] for name in rest]
        columns |= made
        return {name: columns[name] for name in old}

    def _empty(self, name: str, row: Tree, rows: int) -> Column:
        """A new column with zeros as its lookback, which is never written in the first fragment."""
        column = Column.empty(name, row, rows)
        for leaf in leaves_of(column.tree):
            leaf[: self._layout.lookback] = 0
        return column
