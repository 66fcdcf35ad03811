"""LaneRows: the state of a lane's slots in the current fragment, and the step from one fragment to the next."""

import copy
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rollflow.stream.data.column import Column
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ColumnError
from rollflow.stream.data.tree import Tree
from rollflow.stream.fragments.fragment import Fragment, FragmentLayout
from rollflow.stream.fragments.lane_columns import LaneColumns, LaneMemory, SharedRows


class LaneRows:
    """The rows of a lane's N slots in one fragment after the other.

    index        number of the lane
    layout       layout of its fragments
    memory       memory of columns that another process writes to; None: this lane writes all
    is_shared    whether columns lie in shared memory, from the first step on: see `Lane.share`

    row               row of the current observation, H … H+T
    policy_version    version of the weights that the last forward pass used
    episode_start     i64[N] row of the first observation of the slot's episode
    episode_number    i64[N] number of episodes that the slot had before
    custom_data       (slot, number of its episode) -> data that pieces keep with the episode
    fragment          the fragment that is being filled
    """

    def __init__(
        self,
        index: int,
        layout: FragmentLayout,
        observation_space: gym.Space[Any],
        memory: LaneMemory | None = None,
        *,
        is_shared: bool = False,
    ) -> None:
        self.index = index
        self.layout = layout
        self.memory = memory
        self.policy_version = self._version_written = 0
        self.row = self._first_row = layout.lookback
        self._last_row = layout.lookback + layout.num_rows  # the fragment is cut here
        self.episode_start = np.full(layout.num_slots, self.row)
        self.episode_number = np.zeros(layout.num_slots, np.int64)
        self.custom_data: dict[tuple[int, int], dict[Any, Any]] = {}
        self._dead: NDArray[np.bool_] | None = None  # slots whose next step only resets them
        self._extra: tuple[str, ...] | None = None
        self._columns = LaneColumns(layout, memory, is_shared=is_shared)
        self._is_unseen = is_shared  # the first fragment is not yet in shared memory
        self._space = observation_space
        self.fragment = self._fragment(0, self._columns.first(observation_space))

    @property
    def observation_space(self) -> gym.Space[Any]:
        """The space of the `obs` column."""
        return self._space

    @property
    def is_full(self) -> bool:
        """True if the fragment has its T vector steps."""
        return self.row == self._last_row

    @property
    def at_start(self) -> bool:
        """True if the next vector step is the first of a fragment."""
        return self.row == self._first_row

    @property
    def has_begun_again(self) -> bool:
        """True if a slot's first episode was followed by another."""
        return bool(self.episode_number.any())

    @property
    def sequence(self) -> int:
        """Number of the current fragment."""
        return self.fragment.sequence

    @property
    def steps_under_way(self) -> int:
        """Number of transitions that the next vector step makes."""
        return self.layout.num_slots - (0 if self._dead is None else int(np.count_nonzero(self._dead)))

    @property
    def shared(self) -> SharedRows | None:
        """Location of the current fragment in shared memory; None: it is not shared."""
        return self._columns.shared

    # Outputs

    def _add_extra_columns(self, outputs: Mapping[str, Tree]) -> None:
        self._extra = tuple(name for name in outputs if name != Columns.ACTIONS)
        for name in self._extra:
            try:
                self.fragment.columns[name] = self._columns.extra(name, outputs[name])
            except ColumnError as error:
                raise ColumnError(f"lane {self.index}: {error}") from None

    def _refuse_outputs(self, outputs: Mapping[str, Tree]) -> None:
        expected = {Columns.ACTIONS, *(self._extra or ())}
        missing, new = sorted(expected - set(outputs)), sorted(set(outputs) - expected)
        raise ColumnError(
            f"lane {self.index}: the outputs changed between steps: missing {missing}, new {new}; "
            f"every step must give {sorted(expected)}"
        )

    # From fragment to fragment

    def _turn_over(self, *, are_written: bool) -> Fragment:
        """Begin the next fragment, with the last H rows as its lookback; return the old one, sealed.

        are_written    whether environments write observations straight into their column
        """
        old, lookback = self.fragment, self.layout.lookback
        rows = self.row - lookback  # steps made, and the row at which the last H rows begin
        columns = self._columns.like(old.columns, are_written=are_written)
        for name, column in columns.items():
            column.copy_rows(old.columns[name], rows, self.row + (name == Columns.OBS))
        self.episode_start -= rows
        new = self._fragment(old.sequence + 1, columns)
        if self._dead is not None:
            new.episode_start[self._dead] = lookback + 1
            new.episode_number[self._dead] += 1
        new.observation_space = old.observation_space
        new.infos[: lookback + 1] = old.infos[rows : self.row + 1]
        old.custom_data = copy.deepcopy(self.custom_data)
        if old.starts:
            slots = self.layout.num_slots
            old.hand_on_starts(new, np.full(slots, self.row), np.full(slots, rows))
        old.seal(rows)
        number = self.episode_number.tolist()
        self.custom_data = {key: data for key, data in self.custom_data.items() if key[1] == number[key[0]]}
        self.fragment = new
        self.row = lookback
        return old

    def _release_rows(self) -> None:
        """Release the memory of the current fragment, and that which the next ones would reuse."""
        self.fragment.columns.clear()
        self.fragment.infos.clear()
        self.fragment.finals.clear()
        self.memory = None
        self._columns = LaneColumns(self.layout, None)

    def _move_to_shared(self) -> None:
        """Move the columns of the current fragment to shared memory."""
        old = self.fragment
        columns = self._columns.like(old.columns, are_written=True)
        for name, column in columns.items():
            column.copy_rows(old.columns[name], 0, self.row + (name == Columns.OBS))
        columns[Columns.POLICY_VERSION].tree[self.row :] = self._version_written
        old.columns = columns
        self._is_unseen = False

    def _fragment(self, sequence: int, columns: dict[str, Column]) -> Fragment:
        return Fragment(
            self.layout,
            self.index,
            sequence,
            columns,
            episode_start=self.episode_start.copy(),
            episode_number=self.episode_number.copy(),
        )
