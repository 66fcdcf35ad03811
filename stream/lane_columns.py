"""The columns of a lane's fragments: what types they have, and where they lie."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rollflow.stream.blocks import BlockLayout, BlockPool, PrivateBlock, SharedBlock
from rollflow.stream.column import Column
from rollflow.stream.columns import Columns
from rollflow.stream.errors import ColumnError
from rollflow.stream.fragment import FragmentLayout
from rollflow.stream.space import row_of
from rollflow.stream.tree import Tree, leaves_of, map_tree

FINAL_OBS = "final_obs"


class LaneMemory(Protocol):
    """Memory for those columns of a lane that somebody else writes to as well."""

    def next_columns(self) -> dict[str, Column]:
        """New columns for a fragment; the contents are undefined."""
        ...

    def observations(self, row: int) -> Tree:
        """The observations that were written for a row, as the environment gave them: a tree of `any[N, ...]`."""
        ...


class SharedRows(NamedTuple):
    """Where the columns of a fragment lie that other processes may look at, while it is in the making as well.

    number, block    of the pool's
    final_obs        last observations, in the rows in which their episodes ended; None: the `obs` column has them
    """

    layout: BlockLayout
    pool: BlockPool[SharedBlock]
    number: int
    block: NDArray[np.uint8]
    final_obs: Column | None


class LaneColumns:
    """Makes the columns of one fragment after the other; their memory is used again once nobody refers to it.

    memory       where those lie that somebody else writes to; None: nobody does
    is_shared    whether other processes may look at them: see `SharedRows`

    shared       where the last columns that were made lie; None: they are not shared
    """

    def __init__(self, layout: FragmentLayout, memory: LaneMemory | None, *, is_shared: bool = False) -> None:
        self.shared: SharedRows | None = None
        self._layout = layout
        self._memory = memory
        self._is_shared = is_shared
        self._rows = layout.lookback + layout.num_rows
        self._blocks: tuple[BlockLayout, BlockPool[Any]] | None = None  # for columns that `memory` has not
        self._in_blocks: set[str] = set()

    def first(self, observation_space: gym.Space[Any]) -> dict[str, Column]:
        """The columns of the first fragment, as far as they are known before the first step."""
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
        """A column for observations in a space."""
        return self._empty(Columns.OBS, row_of(space, self._layout.num_slots), self._rows + 1)

    def extra(self, name: str, values: Tree) -> Column:
        """A column for an output such as these values. Raises ColumnError where they have not one row per slot."""
        slots = self._layout.num_slots
        row = map_tree(np.asarray, values)
        for leaf in leaves_of(row):
            if leaf.shape[:1] != (slots,) or leaf.dtype.hasobject:
                raise ColumnError(
                    f"output '{name}' is {leaf.dtype}{list(leaf.shape)}, expected numbers with a leading axis of "
                    f"{slots}, one row per slot"
                )
        return self._empty(name, row, self._rows)

    def like(self, old: Mapping[str, Column], *, are_written: bool) -> dict[str, Column]:
        """The columns of the next fragment: like the last one's.

        are_written    whether observations stand in their column as the environments write them
        """
        given = {} if self._memory is None else self._memory.next_columns()
        if not are_written:
            given.pop(Columns.OBS, None)  # what the environments write there is no row of this column
        rest = {name: column for name, column in old.items() if name not in given}
        if self._blocks is None or self._in_blocks != rest.keys():  # outputs come with the first step
            self._in_blocks = set(rest)
            rows = {name: (column.row(0), len(column)) for name, column in rest.items()}
            if self._is_shared and not self._layout.resets_next_step:
                rows[FINAL_OBS] = old[Columns.OBS].row(0), self._rows
            layout = BlockLayout(rows)
            self._blocks = layout, BlockPool(layout.size, SharedBlock if self._is_shared else PrivateBlock)
        layout, pool = self._blocks
        index, block = pool.take()
        made = layout.columns(block)
        if self._is_shared:
            self.shared = SharedRows(layout, pool, index, block, made.get(FINAL_OBS))
        given |= made
        return {name: given[name] for name in old}

    def _empty(self, name: str, row: Tree, rows: int) -> Column:
        """A column whose lookback, which nobody writes to in the first fragment, is zeros."""
        column = Column.empty(name, row, rows)
        for leaf in leaves_of(column.tree):
            leaf[: self._layout.lookback] = 0
        return column
